"""Continuous batching: which requests run in the next step, with how many nodes, on which pages.

First come, first served. A request is admitted when all the pages it can ever need are free, joins at any step, and
leaves at the step in which it finishes or is cancelled. A plan may be sent before the last one's result is known:
pages of a request that ended are reused only by a plan that also tells the workers to forget it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from eyas.deployments.pages import PageAllocator
from eyas.kernels.static_tree import TreeChoices
from eyas.workers.messages import DecodeItem, NewRequest, PrefillChunk, StepPlan, StepResult
from eyas.workers.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of the draft trees of an engine.

    Args:
        node_budget: nodes verified per request and step, root included; 1 is no speculation.
        draft_depth: levels below the root.
        width: candidates kept per level.
        choices: a fixed shape, from which the other three follow; None grows trees from the head's scores.
    """

    node_budget: int = 1
    draft_depth: int = 0
    width: int = 1
    choices: TreeChoices | None = None

    @staticmethod
    def fixed(choices: TreeChoices) -> TreeShape:
        """Every tree has the same shape."""
        width = max(choices.num_candidates(level) for level in range(1, choices.depth + 1))
        return TreeShape(choices.num_nodes, choices.depth, width, choices)

    def __post_init__(self) -> None:
        if self.node_budget < 1:
            raise ValueError(f"node_budget: must be at least 1 (no speculation), got {self.node_budget}")
        if self.node_budget > 1 and self.draft_depth < 1:
            raise ValueError(f"draft_depth: must be at least 1 to draft, got {self.draft_depth}")
        if self.node_budget > 1 and self.width < 1:
            raise ValueError(f"width: must be at least 1, got {self.width}")
        if self.node_budget > 1 and self.choices is None and self.node_budget - 1 > self.num_candidates:
            raise ValueError(
                f"node_budget: {self.node_budget} nodes need {self.node_budget - 1} candidates, but width {self.width} "
                f"and draft_depth {self.draft_depth} score only {self.num_candidates}; lower it to "
                f"{self.num_candidates + 1} or raise width or draft_depth"
            )

    @property
    def num_candidates(self) -> int:
        """Candidates ever scored in one draft: the root's, then width squared per further level."""
        return self.width + (self.draft_depth - 1) * self.width**2 if self.draft_depth else 0

    @property
    def num_block_slots(self) -> int:
        """Slots above the committed text that one step may write, on either side."""
        if self.choices is not None:
            return max(self.node_budget, self.choices.num_expanded)
        return max(self.node_budget, self.width * max(self.draft_depth - 1, 0) if self.node_budget > 1 else 0)

    @property
    def num_extra_slots(self) -> int:
        """Slots a request needs beside its text: one step's tree block, and one step of overshoot."""
        return self.num_block_slots + 2 * (self.draft_depth + 1)


class TokenSink(Protocol):
    """Receives a request's tokens in order and decides when the text ends."""

    def push(self, token_ids: list[int]) -> bool:
        """Take new tokens; True when the request is finished."""

    def fail(self, message: str) -> None:
        """The request cannot go on."""


@dataclass(slots=True)
class ScheduledRequest:
    """A request's bookkeeping on the router.

    Args:
        num_planned: prompt tokens already given to a plan.
        num_steps: verify steps whose result has arrived.
    """

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    sink: TokenSink
    pages: list[int] = field(default_factory=list)
    num_planned: int = 0
    num_steps: int = 0
    num_emitted: int = 0
    is_over: bool = False


class Scheduler:
    """Plans steps and applies their results. Not thread-safe: one engine loop owns it."""

    def __init__(
        self, allocator: PageAllocator, shape: TreeShape, max_batch_size: int, max_prefill_tokens: int,
        max_positions: int | None = None,
    ) -> None:  # fmt: skip
        """Args:
        max_positions: the model's context; None leaves the pool as the only limit.

        Raises:
            ValueError: for a limit under which no request could ever run.
        """
        if max_batch_size < 1 or max_prefill_tokens < 1:
            raise ValueError(
                f"max_batch_size {max_batch_size} and max_prefill_tokens {max_prefill_tokens} must be >= 1"
            )
        self.allocator = allocator
        self.shape = shape
        self.max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._max_positions = max_positions
        if self.max_request_tokens() < 2:
            raise ValueError(
                f"num_pages: {allocator.num_pages} pages of {allocator.page_size} tokens hold no request, whose tree "
                f"alone needs {self.shape.num_extra_slots}; raise num_pages"
            )
        self._waiting: deque[ScheduledRequest] = deque()
        self._running: dict[int, ScheduledRequest] = {}
        self._ended: list[ScheduledRequest] = []
        self._step = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a plan is due; requests that ended must still be announced to the workers."""
        return bool(self._waiting or self._running or self._ended)

    def num_pages_needed(self, num_prompt: int, max_tokens: int) -> int:
        """Pages a request can ever use: its text, one step's tree block, and one step of overshoot."""
        return self.allocator.pages_for(num_prompt + max_tokens + self.shape.num_extra_slots)

    def check_size(self, request: ScheduledRequest) -> None:
        """Raise `ValueError` if the request could never be admitted or has nothing to run."""
        if not request.prompt_ids:
            raise ValueError("prompt: must hold at least one token")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {request.max_tokens}")
        num_tokens = len(request.prompt_ids) + request.max_tokens
        if self._max_positions is not None and num_tokens > self._max_positions:
            raise ValueError(
                f"max_tokens: {len(request.prompt_ids)} prompt tokens and {request.max_tokens} new ones exceed the "
                f"model's context of {self._max_positions}"
            )
        needed = self.num_pages_needed(len(request.prompt_ids), request.max_tokens)
        if needed > self.allocator.num_pages:
            raise ValueError(
                f"max_tokens: prompt and answer need {needed} pages of {self.allocator.page_size} tokens, the server "
                f"has {self.allocator.num_pages}; lower max_tokens or serve with more num_pages"
            )

    def submit(self, request: ScheduledRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: if it could never be admitted.
        """
        self.check_size(request)
        self._waiting.append(request)

    def max_request_tokens(self) -> int:
        """Most tokens, prompt and answer, of one request: what the pool and the model's context hold."""
        allocator = self.allocator
        num_held = allocator.num_pages * allocator.page_size - self.shape.num_extra_slots
        return num_held if self._max_positions is None else min(num_held, self._max_positions)

    def cancel(self, request_id: int) -> None:
        """End a request without further tokens; unknown ids are ignored, it may have finished meanwhile."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return
        request_or_none = self._running.get(request_id)
        if request_or_none is not None:
            self._end(request_or_none)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to tell the workers."""
        finished = [request.request_id for request in self._ended]
        for request in self._ended:
            self.allocator.free(request.pages)
        self._ended.clear()
        decode = [
            DecodeItem(request.request_id, self.shape.node_budget)
            for request in self._running.values()
            if request.num_planned == len(request.prompt_ids)
        ]
        admitted = self._admit()
        prefill = self._plan_prefill()
        if not (finished or decode or prefill):
            return None
        self._step += 1
        return StepPlan(
            step=self._step,
            new=[NewRequest(request.request_id, request.prompt_ids, request.sampling) for request in admitted],
            new_pages={request.request_id: request.pages for request in admitted},
            finished=finished,
            prefill=prefill,
            decode=decode,
            draft_depth=self.shape.draft_depth,
            width=self.shape.width,
        )

    def apply(self, result: StepResult) -> None:
        """Hand a step's tokens to their requests; those that ended leave the batch."""
        for run in result.runs:
            request = self._running.get(run.request_id)
            if request is None:
                continue
            message = result.errors.get(run.request_id)
            if message is not None:
                request.sink.fail(message)
                self._end(request)
                continue
            if run.tokens:
                request.num_steps += run.start >= len(request.prompt_ids)
                request.num_emitted += len(run.tokens)
                if request.sink.push(run.tokens):
                    self._end(request)

    def fail_all(self, message: str) -> None:
        """Tell every request that it cannot go on, and forget them."""
        for request in [*self._running.values(), *self._waiting]:
            request.sink.fail(message)
        self._waiting.clear()
        for request in list(self._running.values()):
            self._end(request)

    def _admit(self) -> list[ScheduledRequest]:
        admitted = []
        while self._waiting and len(self._running) < self.max_batch_size:
            request = self._waiting[0]
            pages = self.allocator.allocate(self.num_pages_needed(len(request.prompt_ids), request.max_tokens))
            if pages is None:
                break
            request.pages = pages
            self._running[request.request_id] = request
            admitted.append(self._waiting.popleft())
        return admitted

    def _plan_prefill(self) -> list[PrefillChunk]:
        """Prompt chunks in order of arrival, within the step's token budget."""
        budget = self._max_prefill_tokens
        chunks = []
        for request in self._running.values():
            length = min(budget, len(request.prompt_ids) - request.num_planned)
            if length > 0:
                chunks.append(PrefillChunk(request.request_id, length))
                request.num_planned += length
                budget -= length
        return chunks

    def _end(self, request: ScheduledRequest) -> None:
        if not request.is_over:
            request.is_over = True
            del self._running[request.request_id]
            self._ended.append(request)
