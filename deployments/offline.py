"""Batch generation without HTTP: the scheduler driving any workers until every request is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import ScheduledRequest, Scheduler, TreeShape
from eyas.workers.messages import StepPlan, StepResult
from eyas.workers.sampling import SamplingParams


class Workers(Protocol):
    """Executes plans: in this process or behind sockets."""

    def step(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """One prompt; generation ends at `stop_token_ids` or after `max_tokens`."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class OfflineOutput:
    """Tokens of one answer, its stop token included; `request_id` is what the workers knew it by."""

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_step_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify step, tokens past the end of the text not counted."""
        return self.num_step_tokens / self.num_steps if self.num_steps else 0.0


def acceptance_length(outputs: Iterable[OfflineOutput]) -> float:
    """Mean tokens per verify step over several answers; 0 without a step."""
    num_tokens, num_steps = 0, 0
    for output in outputs:
        num_tokens += output.num_step_tokens
        num_steps += output.num_steps
    return num_tokens / num_steps if num_steps else 0.0


def seeded_requests(
    prompts: Iterable[list[int]], temperature: float, seed: int, max_tokens: int, stop_token_ids: frozenset[int]
) -> list[OfflineRequest]:
    """One request per prompt; prompt i is sampled with `seed + i`."""
    return [
        OfflineRequest(prompt, SamplingParams(temperature, 1.0, seed + index), max_tokens, stop_token_ids)
        for index, prompt in enumerate(prompts)
    ]


@dataclass(slots=True)
class StepTimes:
    """Accumulated wall time of the verify steps, and of everything."""

    num_steps: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    total_ms: float = 0.0
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Collector:
    request: OfflineRequest
    output: OfflineOutput
    on_finish: Callable[[], None]
    has_first: bool = False

    def push(self, token_ids: list[int]) -> bool:
        is_step = self.has_first  # the first token comes from the prompt's prefill, not from a verify step
        self.has_first = True
        self.output.num_steps += is_step
        for token_id in token_ids:
            self.output.token_ids.append(token_id)
            self.output.num_step_tokens += is_step
            if token_id in self.request.stop_token_ids or len(self.output.token_ids) >= self.request.max_tokens:
                self.on_finish()
                return True
        return False

    def fail(self, message: str) -> None:
        raise RuntimeError(message)


class OfflineEngine:
    """Generates for lists of prompts; keeps no state between calls.

    Args:
        workers: may be exchanged between calls, for others that answer the same plans.
    """

    def __init__(
        self, workers: Workers, allocator: PageAllocator, shape: TreeShape, max_batch_size: int,
        max_prefill_tokens: int = 512, max_positions: int | None = None,
    ) -> None:  # fmt: skip
        """See `Scheduler`."""
        self.workers = workers
        self._scheduler = Scheduler(allocator, shape, max_batch_size, max_prefill_tokens, max_positions)
        self._next_id = 0
        self.times = StepTimes()

    def generate(
        self, requests: list[OfflineRequest], on_finish: Callable[[], None] = lambda: None
    ) -> list[OfflineOutput]:
        """Answer all requests, in continuous batches.

        Args:
            on_finish: called once per finished request, for progress bars.
        """
        outputs = [OfflineOutput(self._next_id + index) for index in range(len(requests))]
        self._next_id += len(requests)
        try:
            for request, output in zip(requests, outputs, strict=True):
                sink = _Collector(request, output, on_finish)
                self._scheduler.submit(
                    ScheduledRequest(output.request_id, request.prompt_ids, request.sampling, request.max_tokens, sink)
                )
            start = time.perf_counter()
            while self._scheduler.has_work:
                self._step()
            self.times.elapsed_s += time.perf_counter() - start
        except BaseException:
            for output in outputs:
                self._scheduler.cancel(output.request_id)
            raise
        return outputs

    def _step(self) -> None:
        start = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            raise RuntimeError("requests are waiting but none can be admitted")
        result = self.workers.step(plan)
        if result.step != plan.step:  # left over from a call that was interrupted
            raise RuntimeError(f"result of step {result.step} arrived for step {plan.step}")
        self._scheduler.apply(result)
        if plan.decode and not plan.prefill:
            times = self.times
            times.num_steps += 1
            times.draft_ms += result.draft_ms
            times.verify_ms += result.verify_ms
            times.total_ms += (time.perf_counter() - start) * 1e3
