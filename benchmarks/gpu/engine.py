"""An engine of random weights in this process: requests admitted and prefilled, then steps of a chosen tree shape.

Both sides run the code that workers run; there is no router, pages are handed out in shuffled order and never run out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.messages import AcceptedRun, DecodeItem, NewRequest, PrefillChunk, StepPlan
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

Trees = dict[int, tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What is drafted for every request in a step."""

    num_nodes: int
    draft_depth: int
    width: int


class Engine:
    """Requests of equal prompts' length over one target and one drafter."""

    def __init__(self, target: TargetRunner, drafter: DraftRunner | None, layout: PoolLayout) -> None:
        self.target = target
        self.drafter = drafter
        self.texts: dict[int, list[int]] = {}
        self._layout = layout
        self._pages = random.Random(0).sample(range(layout.num_pages), layout.num_pages)
        self._num_steps = 0

    def admit(self, request_ids: list[int], prompt_length: int, max_length: int, temperature: float = 0.0) -> None:
        """Prefill new requests, each with pages for `max_length` tokens.

        Args:
            temperature: of every second request; the others are greedy.
        """
        vocab_size = self.target.model.config.vocab_size
        new, new_pages = [], {}
        for request_id in request_ids:
            prompt = random.Random(request_id).choices(range(vocab_size), k=prompt_length)
            sampling = SamplingParams(temperature if request_id % 2 else 0.0, 1.0, request_id)
            new.append(NewRequest(request_id, prompt, sampling))
            new_pages[request_id] = [self._pages.pop() for _ in range(-(-max_length // self._layout.page_size))]
            self.texts[request_id] = []
        # One request at a time: chunks of a large batch at once would take more memory than any step to come.
        for request in new:
            pages = {request.request_id: new_pages[request.request_id]}
            chunk = PrefillChunk(request.request_id, prompt_length)
            self._run(StepPlan(self._next(), new=[request], new_pages=pages, prefill=[chunk]), {})

    def finish(self, request_ids: list[int]) -> None:
        """Drop requests; their pages are not used again."""
        plan = StepPlan(self._next(), finished=request_ids)
        self._run(plan, {})
        for request_id in request_ids:
            del self.texts[request_id]

    def plan(self, shape: TreeShape) -> StepPlan:
        """The next step of all live requests."""
        items = [DecodeItem(request_id, shape.num_nodes) for request_id in self.texts]
        return StepPlan(self._next(), decode=items, draft_depth=shape.draft_depth, width=shape.width)

    def step(self, shape: TreeShape) -> list[AcceptedRun]:
        """Draft, verify, extend."""
        plan = self.plan(shape)
        return self._run(plan, self.draft(plan))

    def draft(self, plan: StepPlan) -> Trees:
        """Grow the trees of a step; may be called again and again, the state it starts from stays."""
        return {} if self.drafter is None else self.drafter.draft(plan)

    def verify(self, plan: StepPlan, trees: Trees) -> list[AcceptedRun]:
        """The target's part of a step alone."""
        runs = self.target.step(plan, trees).runs
        for run in runs:
            self.texts[run.request_id] += run.tokens
        return runs

    def _run(self, plan: StepPlan, trees: Trees) -> list[AcceptedRun]:
        if self.drafter is not None:
            self.drafter.update_requests(plan)
        verified = self.target.step(plan, trees)
        if verified.errors:
            raise RuntimeError(f"the step failed: {verified.errors}")
        if self.drafter is not None and verified.features is not None:
            self.drafter.extend(verified.runs, verified.features)
        for run in verified.runs:
            self.texts[run.request_id] += run.tokens
        return verified.runs

    def _next(self) -> int:
        self._num_steps += 1
        return self._num_steps
