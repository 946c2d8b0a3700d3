"""Target and drafter in one process, without Ray: the same runners, called in turn."""

from __future__ import annotations

import time
from typing import Protocol

from torch import Tensor

from eyas.workers.messages import AcceptedRun, StepPlan, StepResult
from eyas.workers.target import TargetRunner


class Drafter(Protocol):
    """What a step asks of whoever reads the target's features; see `DraftRunner`."""

    def update_requests(self, plan: StepPlan) -> None: ...

    def draft(self, plan: StepPlan) -> dict[int, tuple[list[int], list[int]]]: ...

    def extend(self, runs: list[AcceptedRun], features: Tensor) -> None: ...


class LocalWorkers:
    """Runs step plans synchronously; the interface of the remote workers without the wire."""

    def __init__(self, target: TargetRunner, drafter: Drafter | None) -> None:
        self.target = target
        self.drafter = drafter

    def step(self, plan: StepPlan) -> StepResult:
        """Draft, verify, accept, compact, extend."""
        start = time.perf_counter()
        trees = {}
        if self.drafter is not None:
            self.drafter.update_requests(plan)
            trees = self.drafter.draft(plan)
        drafted = time.perf_counter()
        verified = self.target.step(plan, trees)
        finished = time.perf_counter()
        if self.drafter is not None and verified.features is not None:
            self.drafter.extend(verified.runs, verified.features)
        extended = time.perf_counter()
        return StepResult(
            step=plan.step,
            runs=verified.runs,
            errors=verified.errors,
            draft_ms=(drafted - start + extended - finished) * 1e3,
            verify_ms=(finished - drafted) * 1e3,
        )
