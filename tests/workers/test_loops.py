"""The worker loops over real sockets and a real exchange ring give what the runners give in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import TreeShape
from eyas.workers.channel import Outbox, router_inbox, worker_inbox
from eyas.workers.exchange import attach_exchange, create_exchange
from eyas.workers.loading import EngineSpec, load_drafter, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.loops import DraftLoop, TargetLoop
from eyas.workers.messages import DraftedTrees, Shutdown, StepOutcome, StepPlan, StepResult
from eyas.workers.ring import RingShape
from eyas.workers.sampling import SamplingParams

SHAPE = TreeShape(node_budget=6, draft_depth=3, width=2)


class WiredWorkers:
    """Target and drafter loops in threads, wired as their actors wire them."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.context = zmq.Context[Any](1)
        router = router_inbox(self.context, f"ipc://{folder}/router")
        target_inbox = worker_inbox(self.context, f"ipc://{folder}/target")
        draft_inbox = worker_inbox(self.context, f"ipc://{folder}/draft")
        runner, drafter = load_target(spec), load_drafter(spec)
        assert drafter is not None
        ring = create_exchange(RingShape(2, 64, len(runner.capture) * 32, "float32"), runner.device)
        attached = attach_exchange(ring.handle, drafter.device)
        ring.unlink()

        self.sockets: list[Any] = [router, target_inbox, draft_inbox]

        def connect(address: str) -> Outbox:
            self.sockets.append(Outbox(self.context, address))
            outbox: Outbox = self.sockets[-1]
            return outbox

        target_loop = TargetLoop(
            runner, target_inbox, True, connect(router.address), connect(draft_inbox.address), ring
        )
        draft_loop = DraftLoop(drafter, draft_inbox, [connect(target_inbox.address)], attached)
        self.router = router
        self.outboxes = [connect(target_inbox.address), connect(draft_inbox.address)]
        self.threads = [threading.Thread(target=loop.run, daemon=True) for loop in (target_loop, draft_loop)]
        for thread in self.threads:
            thread.start()

    def step(self, plan: StepPlan) -> StepResult:
        for outbox in self.outboxes:
            outbox.send(plan)
        result: StepResult | None = self.router.receive(30.0)
        assert result is not None
        return result

    def stop(self) -> None:
        for outbox in self.outboxes:
            outbox.send(Shutdown())
        for thread in self.threads:
            thread.join(timeout=30.0)
        assert not any(thread.is_alive() for thread in self.threads)
        for opened in self.sockets:
            opened.close()
        self.context.term()


@pytest.fixture
def spec(tiny_models: Any) -> EngineSpec:
    target = tiny_models.target()
    return EngineSpec(str(target), str(tiny_models.head(target)), "float32", "cpu", 64, 4, num_threads=1)


def requests() -> list[OfflineRequest]:
    return [
        OfflineRequest([3 + index, 5, 7 * index % 60, 11][: 2 + index % 3], SamplingParams(temperature, 1.0, index), 12)
        for index, temperature in enumerate([0.0, 0.9, 0.0, 1.0, 0.0])
    ]


def answers(workers: Any) -> list[list[int]]:
    engine = OfflineEngine(workers, PageAllocator(64, 4), SHAPE, max_batch_size=3, max_prefill_tokens=3)
    return [output.token_ids for output in engine.generate(requests())]


def test_wired_loops_equal_local_workers(spec: EngineSpec, tmp_path: Path) -> None:
    """Trees, outcomes or features matched to the wrong step or request on the wire."""
    wired = WiredWorkers(spec, tmp_path)
    assert answers(wired) == answers(LocalWorkers(load_target(spec), load_drafter(spec)))
    wired.stop()


def test_pages_are_reported_and_return_to_zero(spec: EngineSpec, tmp_path: Path) -> None:
    """Pages that one of the two sides keeps after a request ended."""
    wired = WiredWorkers(spec, tmp_path)
    answers(wired)
    result = wired.step(StepPlan(step=10_000))
    assert (result.target_pages, result.drafter_pages) == (0, 0)
    wired.stop()


def test_a_plan_may_be_sent_ahead(spec: EngineSpec, tmp_path: Path) -> None:
    """A drafter that drafts step k + 1 before it has extended over step k's tokens."""
    wired = WiredWorkers(spec, tmp_path)

    class SentAhead:
        """Sends an empty plan right behind every plan, before its result."""

        def step(self, plan: StepPlan) -> StepResult:
            for outbox in wired.outboxes:
                outbox.send(plan)
                outbox.send(StepPlan(step=plan.step + 100_000))
            result: StepResult | None = wired.router.receive(30.0)
            following = wired.router.receive(30.0)
            assert result is not None
            assert result.step == plan.step
            assert following.step == plan.step + 100_000
            return result

    assert answers(SentAhead()) == answers(LocalWorkers(load_target(spec), load_drafter(spec)))
    wired.stop()


def test_trees_of_another_step_are_refused(spec: EngineSpec, tmp_path: Path) -> None:
    """A desynchronised drafter must stop the engine, not verify a stale tree."""
    context = zmq.Context[Any](1)
    inbox = worker_inbox(context, f"ipc://{tmp_path}/target")
    outbox = Outbox(context, inbox.address)
    outbox.send(StepPlan(step=2))
    outbox.send(DraftedTrees(1, [], 0.0, 0))
    with pytest.raises(RuntimeError, match="trees of step 1 arrived for step 2"):
        TargetLoop(load_target(spec), inbox, has_drafter=True).run()
    context.destroy(linger=0)


def test_features_of_another_ring_are_refused(spec: EngineSpec, tmp_path: Path) -> None:
    """A drafter that outlived its target reading the old ring's rows for the new one's."""
    context = zmq.Context[Any](1)
    inbox = worker_inbox(context, f"ipc://{tmp_path}/draft")
    drafter = load_drafter(spec)
    assert drafter is not None
    ring = create_exchange(RingShape(1, 1, 1, "float32"), drafter.device)
    ring.unlink()
    generation = ring.handle.generation
    outbox = Outbox(context, inbox.address)
    outbox.send(StepOutcome(3, [], 0, 1, generation + 1))
    with pytest.raises(RuntimeError, match=f"step 3 was published in ring {generation + 1}, .* ring {generation} of"):
        DraftLoop(drafter, inbox, [], ring).run()
    context.destroy(linger=0)
