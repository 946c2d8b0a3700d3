"""The engine thread behind the ingress: joins, leaves, cancels, failures."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from eyas.deployments.engine import Engine
from eyas.deployments.engine_client import (
    EngineDownError,
    GenerationError,
    GenerationEvent,
    GenerationRequest,
    QueueFullError,
)
from eyas.deployments.metrics import Metrics
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import ScheduledRequest, Scheduler, TreeShape
from eyas.workers.messages import AcceptedRun, StepPlan, StepResult
from eyas.workers.sampling import SamplingParams

FIRST_TOKEN = 100
UNDECODABLE = 50


class CountingWorkers:
    """Answers each request with 100, 101, 102, … in runs of two; knows only what plans tell it."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.prompts: dict[int, list[int]] = {}
        self.pages: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self.is_lost = False
        self.broken: set[int] = set()
        self.is_stopped = False
        self.step_s = 0.002

    def send(self, plan: StepPlan) -> None:
        if self.is_lost:
            raise RuntimeError("a worker failed")
        for request_id in plan.finished:
            del self.prompts[request_id], self.pages[request_id]
        for new in plan.new:
            self.prompts[new.request_id] = new.prompt_ids
            self.positions[new.request_id] = 0
        for request_id, pages in plan.new_pages.items():
            self.pages[request_id] = len(pages)
        runs = [self._run(item.request_id, 2) for item in plan.decode]
        for chunk in plan.prefill:
            start = self.positions[chunk.request_id]
            self.positions[chunk.request_id] = start + chunk.length
            is_last = start + chunk.length == len(self.prompts[chunk.request_id])
            runs.append(AcceptedRun(chunk.request_id, start, chunk.length, [FIRST_TOKEN] if is_last else []))
        errors = {run.request_id: "not finite" for run in runs if run.request_id in self.broken}
        pages_held = sum(self.pages.values())
        self.results.put(
            StepResult(plan.step, runs, errors, 1.0, 2.0, target_pages=pages_held, drafter_pages=pages_held)
        )

    def _run(self, request_id: int, length: int) -> AcceptedRun:
        start = self.positions[request_id]
        first = FIRST_TOKEN + start - len(self.prompts[request_id]) + 1
        self.positions[request_id] += length
        return AcceptedRun(request_id, start, length, list(range(first, first + length)))

    def receive(self) -> StepResult:
        time.sleep(self.step_s)
        return self.results.get()

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("a worker failed")

    def stop(self) -> None:
        self.is_stopped = True


class NumberDecoder:
    """Text of a token is its number and a space."""

    eos_token_ids = frozenset({1})

    def decode(self, token_ids: Sequence[int]) -> str:
        if set(token_ids) >= {UNDECODABLE, FIRST_TOKEN}:
            raise ValueError("no text for these tokens")
        return "".join(f"{token} " for token in token_ids)


class Fixture:
    def __init__(self, max_queue_size: int = 8, num_pages: int = 32, max_batch_size: int = 4) -> None:
        self.workers = CountingWorkers()
        self.metrics = Metrics()
        self.reasons: list[str] = []
        scheduler = Scheduler(PageAllocator(num_pages, 4), TreeShape(), max_batch_size, max_prefill_tokens=3)
        self.engine = Engine(
            self.workers, scheduler, NumberDecoder(), self.metrics, max_queue_size, on_down=self.reasons.append
        )

    def pages_free(self, worker: str) -> float | None:
        return self.metrics.registry.get_sample_value("eyas_pages_free", {"worker": worker})


def request(name: str, num_prompt: int = 4, max_tokens: int = 7) -> GenerationRequest:
    return GenerationRequest(name, list(range(2, 2 + num_prompt)), SamplingParams(), max_tokens)


async def collect(events: AsyncGenerator[GenerationEvent, None]) -> list[GenerationEvent]:
    return [event async for event in events]


def test_concurrent_requests_each_get_their_own_tokens() -> None:
    """Tokens delivered to the wrong request when several join and leave."""
    fixture = Fixture()

    async def run() -> list[list[GenerationEvent]]:
        names = [(f"r{index}", 1 + index, 3 + index) for index in range(8)]
        return await asyncio.gather(*(collect(fixture.engine.generate(request(*name))) for name in names))

    for index, events in enumerate(asyncio.run(run())):
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == list(range(FIRST_TOKEN, FIRST_TOKEN + 3 + index))
        assert [event.finish_reason for event in events][-1] == "length"
        assert events[-1].num_completion_tokens == 3 + index
    fixture.engine.stop()
    assert fixture.workers.is_stopped


def test_cancelling_midway_frees_pages_on_both_workers() -> None:
    """A client that leaves must not keep its pages, on either side."""
    fixture = Fixture()

    async def run() -> None:
        async with aclosing(fixture.engine.generate(request("long", max_tokens=60))) as events:
            await anext(events)
            await anext(events)
        await collect(fixture.engine.generate(request("next", max_tokens=1)))
        for _ in range(200):
            if fixture.pages_free("target") == fixture.pages_free("drafter") == 32:
                break
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert fixture.pages_free("target") == 32
    assert fixture.pages_free("drafter") == 32
    fixture.engine.stop()


def test_a_lost_worker_fails_everybody_and_turns_health_red() -> None:
    """Clients waiting for ever, or health staying green, after the steps have stopped."""
    fixture = Fixture()

    async def run() -> None:
        async with aclosing(fixture.engine.generate(request("r", max_tokens=60))) as events:
            await anext(events)
            fixture.workers.is_lost = True
            with pytest.raises(EngineDownError, match="a worker failed"):
                await collect(events)
        with pytest.raises(EngineDownError):
            await anext(fixture.engine.generate(request("later")))

    asyncio.run(run())
    assert not fixture.engine.health().is_serving
    fixture.engine.stop()
    assert len(fixture.reasons) == 1
    assert fixture.workers.is_stopped


def test_a_request_that_arrives_as_the_engine_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for ever, because the engine ended between the check for that and the queueing."""
    fixture = Fixture()

    def lose_workers(self: Scheduler, scheduled: ScheduledRequest) -> None:
        fixture.workers.is_lost = True
        while not fixture.reasons:
            time.sleep(0.01)

    monkeypatch.setattr(Scheduler, "check_size", lose_workers)

    async def run() -> None:
        with pytest.raises(EngineDownError, match="a worker failed"):
            await asyncio.wait_for(anext(fixture.engine.generate(request("late"))), timeout=10)

    asyncio.run(run())
    fixture.engine.stop()


def test_stopping_ends_open_requests() -> None:
    """Streams that hang when their replica is shut down, and requests taken by an engine that has ended."""
    fixture = Fixture()

    async def run() -> None:
        async with aclosing(fixture.engine.generate(request("open", max_tokens=60))) as events:
            await anext(events)
            await asyncio.to_thread(fixture.engine.stop)
            with pytest.raises(EngineDownError, match="was stopped"):
                await asyncio.wait_for(collect(events), timeout=10)
        with pytest.raises(EngineDownError):
            await asyncio.wait_for(anext(fixture.engine.generate(request("later"))), timeout=10)

    asyncio.run(run())
    assert not fixture.reasons  # nobody restarts what was stopped on purpose


def test_tokens_without_text_fail_their_request_alone() -> None:
    """One request that cannot be decoded ending the engine, and with it everybody's answers."""
    fixture = Fixture()

    async def run() -> list[GenerationEvent]:
        with pytest.raises(GenerationError, match="turned into text"):
            await collect(fixture.engine.generate(GenerationRequest("bad", [UNDECODABLE], SamplingParams(), 5)))
        return await collect(fixture.engine.generate(request("good")))

    assert asyncio.run(run())[-1].finish_reason == "length"
    fixture.engine.stop()


def test_a_bad_request_fails_alone() -> None:
    """One request's NaN logits ending its neighbours' answers."""
    fixture = Fixture()

    async def run() -> list[GenerationEvent]:
        fixture.workers.broken.add(0)
        bad = fixture.engine.generate(request("bad", max_tokens=60))
        with pytest.raises(GenerationError, match="not finite"):
            await collect(bad)
        return await collect(fixture.engine.generate(request("good", max_tokens=5)))

    assert len(asyncio.run(run())[-1].token_ids) >= 1
    fixture.engine.stop()


def test_a_full_queue_is_refused_at_once() -> None:
    """Unbounded queueing hides overload from clients that could go elsewhere."""
    fixture = Fixture(max_queue_size=1, max_batch_size=1)

    async def run() -> None:
        open_generators = [fixture.engine.generate(request(f"r{index}", max_tokens=60)) for index in range(2)]
        first = [asyncio.ensure_future(anext(generator)) for generator in open_generators]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFullError):
            await anext(fixture.engine.generate(request("one too many")))
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        for generator in open_generators:
            await generator.aclose()

    asyncio.run(run())
    fixture.engine.stop()
