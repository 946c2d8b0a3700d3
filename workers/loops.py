"""The long-lived loops of the workers: plans in, results out, until a shutdown message.

They match messages by step: a drafter plans step k only after extending over step k - 1's outcome, a target rank
verifies step k with the trees of step k. The router may therefore send a plan before the last one's result.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TypeVar

from eyas.workers.channel import Inbox, Outbox
from eyas.workers.draft import DraftRunner
from eyas.workers.exchange import HiddenStateExchange
from eyas.workers.messages import (
    DraftedTree,
    DraftedTrees,
    Shutdown,
    StepOutcome,
    StepPlan,
    StepResult,
)
from eyas.workers.target import TargetRunner, VerifiedStep

PEER_TIMEOUT_S = 60.0
M = TypeVar("M", StepPlan, DraftedTrees)


class TargetLoop:
    """One target rank's loop; only rank 0 has outboxes and an exchange."""

    def __init__(
        self, runner: TargetRunner, inbox: Inbox, has_drafter: bool, to_router: Outbox | None = None,
        to_drafter: Outbox | None = None, exchange: HiddenStateExchange | None = None,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._inbox = inbox
        self._has_drafter = has_drafter
        self._to_router = to_router
        self._to_drafter = to_drafter
        self._exchange = exchange
        self._plans: deque[StepPlan] = deque()
        self._trees: deque[DraftedTrees] = deque()

    def run(self) -> None:
        """Verify plan after plan; returns on shutdown.

        Raises:
            TimeoutError: if the drafter stays silent.
        """
        while (plan := self._next(self._plans, None)) is not None:
            drafted = DraftedTrees(plan.step, [], 0.0, 0)
            if self._has_drafter:
                received = self._next(self._trees, PEER_TIMEOUT_S)
                if received is None:
                    return
                drafted = received
                if drafted.step != plan.step:
                    raise RuntimeError(f"trees of step {drafted.step} arrived for step {plan.step}")
            start = time.perf_counter()
            verified = self._runner.step(plan, {tree.request_id: (tree.tokens, tree.parents) for tree in drafted.trees})
            verify_ms = (time.perf_counter() - start) * 1e3
            self._report(plan, drafted, verified, verify_ms)

    def _report(self, plan: StepPlan, drafted: DraftedTrees, verified: VerifiedStep, verify_ms: float) -> None:
        if self._to_drafter is not None and self._exchange is not None:
            slot, sequence = -1, -1
            if verified.features is not None:
                slot, sequence = self._exchange.publish(verified.features, PEER_TIMEOUT_S)
            generation = self._exchange.handle.generation
            self._to_drafter.send(StepOutcome(plan.step, verified.runs, slot, sequence, generation))
        if self._to_router is not None:
            self._to_router.send(
                StepResult(
                    step=plan.step,
                    runs=verified.runs,
                    errors=verified.errors,
                    draft_ms=drafted.draft_ms,
                    verify_ms=verify_ms,
                    target_pages=self._runner.num_granted_pages,
                    drafter_pages=drafted.num_pages,
                )
            )

    def _next(self, wanted: deque[M], timeout_s: float | None) -> M | None:
        """The next message for one of the two queues, keeping the others for later; None on shutdown."""
        while not wanted:
            message = self._inbox.receive(timeout_s)
            if message is None:
                raise TimeoutError(f"the drafter sent no trees for {timeout_s} s")
            if isinstance(message, Shutdown):
                return None
            if isinstance(message, StepPlan):
                self._plans.append(message)
            elif isinstance(message, DraftedTrees):
                self._trees.append(message)
        return wanted.popleft()


class DraftLoop:
    """The drafter's loop."""

    def __init__(
        self, runner: DraftRunner, inbox: Inbox, to_targets: list[Outbox], exchange: HiddenStateExchange
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._to_targets = to_targets
        self._exchange = exchange
        self._plans: deque[StepPlan] = deque()
        self._awaits_outcome = False
        self._extend_ms = 0.0

    def run(self) -> None:
        """Extend and draft, step after step; returns on shutdown."""
        while True:
            message = self._inbox.receive()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, StepPlan):
                self._plans.append(message)
            elif isinstance(message, StepOutcome):
                self._extend(message)
            if self._plans and not self._awaits_outcome:
                self._draft(self._plans.popleft())

    def _extend(self, outcome: StepOutcome) -> None:
        start = time.perf_counter()
        if outcome.exchange_slot >= 0:
            generation = self._exchange.handle.generation
            if outcome.exchange_generation != generation:
                raise RuntimeError(
                    f"step {outcome.step} was published in ring {outcome.exchange_generation}, but this drafter is "
                    f"attached to ring {generation} of another run"
                )
            num_rows = sum(run.num_committed for run in outcome.runs)
            features = self._exchange.take(outcome.exchange_slot, outcome.exchange_sequence, num_rows)
            self._runner.extend(outcome.runs, features)
        self._awaits_outcome = False
        self._extend_ms = (time.perf_counter() - start) * 1e3

    def _draft(self, plan: StepPlan) -> None:
        start = time.perf_counter()
        self._runner.update_requests(plan)
        drafted = self._runner.draft(plan)
        draft_ms = (time.perf_counter() - start) * 1e3 + self._extend_ms
        trees = [DraftedTree(request_id, tokens, parents) for request_id, (tokens, parents) in drafted.items()]
        message = DraftedTrees(plan.step, trees, draft_ms, self._runner.num_granted_pages)
        for outbox in self._to_targets:
            outbox.send(message)
        self._awaits_outcome = True
