"""The scheduler against workers without a model, which check every plan as the real ones depend on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import ScheduledRequest, Scheduler, TreeShape
from eyas.kernels.grow import TreeGrowth
from eyas.workers.messages import AcceptedRun, StepPlan, StepResult
from eyas.workers.sampling import SamplingParams

SHAPES = [TreeShape(), TreeShape(2, 1, 1), TreeShape(5, 4, 1), TreeShape(8, 3, 2), TreeShape(16, 2, 4)]


def token_of(request_id: int, index: int) -> int:
    return 1000 * request_id + index


@dataclass
class Sink:
    """Takes tokens until `stop_after`; whatever comes then is a fault."""

    stop_after: int
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_over: bool = False

    def push(self, token_ids: list[int]) -> bool:
        assert not self.is_over
        assert token_ids
        self.tokens += token_ids
        self.is_over = len(self.tokens) >= self.stop_after
        return self.is_over

    def fail(self, message: str) -> None:
        assert not self.is_over
        self.error = message
        self.is_over = True


@dataclass
class WorkerRequest:
    num_prompt: int
    pages: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_emitted: int = 0


class FakeWorkers:
    """Accepts a random part of every draft; refuses any plan that real workers could not carry out."""

    def __init__(self, scheduler: Scheduler, max_prefill_tokens: int, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.max_prefill_tokens = max_prefill_tokens
        self.rng = rng
        self.live: dict[int, WorkerRequest] = {}
        self.admitted: list[int] = []
        self.num_steps = 0

    def step(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        assert plan.step == self.num_steps < 2000
        assert (plan.draft_depth, plan.width) == (self.scheduler.shape.draft_depth, self.scheduler.shape.width)
        self._update(plan)
        ready = [i for i, request in self.live.items() if request.num_committed >= request.num_prompt]
        assert [item.request_id for item in plan.decode] == ready
        runs = [self._verify(item.request_id, item.num_nodes) for item in plan.decode]
        assert sum(chunk.length for chunk in plan.prefill) <= self.max_prefill_tokens
        runs += [self._prefill(chunk.request_id, chunk.length) for chunk in plan.prefill]
        self._check_prefill_order(plan)
        errors = {run.request_id: "broken" for run in runs if run.tokens and self.rng.random() < 0.02}
        return StepResult(plan.step, runs, errors)

    def _update(self, plan: StepPlan) -> None:
        for request_id in plan.finished:
            del self.live[request_id]
        for new in plan.new:
            assert new.request_id not in self.live
            self.live[new.request_id] = WorkerRequest(len(new.prompt_ids))
            self.admitted.append(new.request_id)
        for request_id, pages in plan.new_pages.items():
            self.live[request_id].pages += pages
        held = [page for request in self.live.values() for page in request.pages]
        assert len(set(held)) == len(held)
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_pages - len(held)
        assert len(self.live) <= self.scheduler.max_batch_size

    def _verify(self, request_id: int, num_nodes: int) -> AcceptedRun:
        request, shape = self.live[request_id], self.scheduler.shape
        assert num_nodes == shape.node_budget
        # The tree's rows on the target, and the drafter's: the last level is scored but never run.
        drafted = shape.width * (shape.draft_depth - 1) if num_nodes > 1 else 0
        num_slots = len(request.pages) * self.scheduler.allocator.page_size
        assert request.num_committed + max(num_nodes, drafted) <= num_slots
        return self._emit(request_id, self.rng.randint(1, min(num_nodes, shape.draft_depth + 1)))

    def _emit(self, request_id: int, count: int) -> AcceptedRun:
        request = self.live[request_id]
        tokens = [token_of(request_id, request.num_emitted + index) for index in range(count)]
        run = AcceptedRun(request_id, request.num_committed, count, tokens)
        request.num_emitted += count
        request.num_committed += count
        return run

    def _prefill(self, request_id: int, length: int) -> AcceptedRun:
        request = self.live[request_id]
        start = request.num_committed
        assert 0 < length <= request.num_prompt - start
        request.num_committed += length
        if request.num_committed < request.num_prompt:
            return AcceptedRun(request_id, start, length, [])
        request.num_emitted = 1
        return AcceptedRun(request_id, start, length, [token_of(request_id, 0)])

    def _check_prefill_order(self, plan: StepPlan) -> None:
        """Whoever came first has its prompt taken in first, and the step's budget is not left unused."""
        unfinished = [i for i, request in self.live.items() if request.num_committed < request.num_prompt]
        assert unfinished == sorted(unfinished)
        if unfinished:
            assert sum(chunk.length for chunk in plan.prefill) == self.max_prefill_tokens
            assert all(chunk.request_id <= unfinished[0] for chunk in plan.prefill)


@given(
    shape=st.sampled_from(SHAPES),
    page_size=st.sampled_from([1, 3, 16]),
    max_batch_size=st.integers(1, 5),
    max_prefill_tokens=st.integers(1, 20),
    is_ahead=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_every_request_gets_exactly_its_tokens(
    shape: TreeShape, page_size: int, max_batch_size: int, max_prefill_tokens: int, is_ahead: bool, rng: random.Random
) -> None:
    """Catches lost or foreign tokens, shared or leaked pages, and queue-jumping, under arrivals and cancels."""
    scheduler = Scheduler(PageAllocator(120 // page_size, page_size), shape, max_batch_size, max_prefill_tokens)
    workers = FakeWorkers(scheduler, max_prefill_tokens, rng)
    requests: list[ScheduledRequest] = []
    cancelled: set[int] = set()
    unapplied: list[StepResult] = []
    num_to_come = rng.randint(1, 12)
    while num_to_come or scheduler.has_work or unapplied:
        while num_to_come and rng.random() < 0.3:
            num_to_come -= 1
            max_tokens = rng.randint(1, 20)
            sink = Sink(rng.randint(1, max_tokens))
            prompt_ids = [0] * rng.randint(1, 25)
            requests.append(ScheduledRequest(len(requests), prompt_ids, SamplingParams(), max_tokens, sink))
            scheduler.submit(requests[-1])
        if requests and rng.random() < 0.05:
            request = rng.choice(requests)
            scheduler.cancel(request.request_id)
            if not request.sink.is_over:
                cancelled.add(request.request_id)
                request.sink.is_over = True
        plan = scheduler.plan()
        if plan is not None:
            unapplied.append(workers.step(plan))
            check_admission(scheduler)
        if unapplied and (plan is None or len(unapplied) > is_ahead):
            scheduler.apply(unapplied.pop(0))
    for request in requests:
        tokens = request.sink.tokens
        assert tokens == [token_of(request.request_id, index) for index in range(len(tokens))]
        assert request.num_emitted == len(tokens)
        if request.request_id not in cancelled and request.sink.error is None:
            assert len(tokens) >= request.sink.stop_after
            assert len(tokens) < request.sink.stop_after + shape.draft_depth + 1
    assert workers.live == {}
    assert workers.admitted == sorted(workers.admitted)
    assert set(range(len(requests))) - set(workers.admitted) <= cancelled
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


def check_admission(scheduler: Scheduler) -> None:
    """Nobody waits who could run."""
    if scheduler.num_waiting and scheduler.num_running < scheduler.max_batch_size:
        first = scheduler._waiting[0]
        assert scheduler.num_pages_needed(len(first.prompt_ids), first.max_tokens) > scheduler.allocator.num_free


def new_scheduler(num_pages: int = 10, shape: TreeShape = SHAPES[0], max_batch_size: int = 2) -> Scheduler:
    return Scheduler(PageAllocator(num_pages, 4), shape, max_batch_size, max_prefill_tokens=4)


def new_request(request_id: int, num_prompt: int = 4, max_tokens: int = 6) -> ScheduledRequest:
    return ScheduledRequest(request_id, [7] * num_prompt, SamplingParams(), max_tokens, Sink(max_tokens))


def test_pages_are_reused_only_with_the_farewell() -> None:
    """Catches pages given away while a plan already sent still writes to them."""
    scheduler = new_scheduler(num_pages=4)
    assert scheduler.num_pages_needed(4, 6) == 4
    first, second = new_request(0), new_request(1)
    scheduler.submit(first)
    scheduler.submit(second)
    plan = scheduler.plan()
    ahead = scheduler.plan()  # sent before the first result is known
    assert plan is not None
    assert ahead is not None
    assert plan.new_pages == {0: first.pages}
    assert not ahead.new
    scheduler.cancel(0)
    last = scheduler.plan()
    assert last is not None
    assert last.finished == [0]
    assert [new.request_id for new in last.new] == [1]
    assert sorted(last.new_pages[1]) == sorted(plan.new_pages[0])


def test_results_after_the_end_are_dropped() -> None:
    """Catches tokens of a step that was already sent reaching a request that is over."""
    scheduler = new_scheduler()
    request = new_request(0, max_tokens=1)
    scheduler.submit(request)
    scheduler.plan()
    ahead = scheduler.plan()
    assert ahead is not None
    assert [item.request_id for item in ahead.decode] == [0]
    scheduler.apply(StepResult(1, [AcceptedRun(0, 0, 4, [5])]))
    scheduler.apply(StepResult(2, [AcceptedRun(0, 4, 1, [6])]))
    assert request.sink.tokens == [5]
    assert (request.num_steps, request.num_emitted) == (0, 1)
    farewell = scheduler.plan()
    assert farewell is not None
    assert (farewell.finished, farewell.decode, farewell.prefill) == ([0], [], [])
    assert not scheduler.has_work
    assert scheduler.plan() is None


def test_steps_are_counted_apart_from_the_prompt() -> None:
    """Catches an acceptance length that counts the token of the prompt's own pass."""
    scheduler = new_scheduler(shape=SHAPES[3])
    request = new_request(0)
    scheduler.submit(request)
    scheduler.plan()
    scheduler.apply(StepResult(1, [AcceptedRun(0, 0, 4, [5])]))
    scheduler.apply(StepResult(2, [AcceptedRun(0, 4, 3, [6, 7, 8])]))
    assert (request.num_steps, request.num_emitted) == (1, 4)


def test_error_ends_its_request_alone() -> None:
    """Catches one request's NaN ending the batch, or its garbage token being sent."""
    scheduler = new_scheduler()
    sick, healthy = new_request(0, num_prompt=2), new_request(1, num_prompt=2)
    scheduler.submit(sick)
    scheduler.submit(healthy)
    scheduler.plan()
    scheduler.apply(StepResult(1, [AcceptedRun(0, 0, 2, [5]), AcceptedRun(1, 0, 2, [6])], errors={0: "not finite"}))
    assert (sick.sink.error, sick.sink.tokens) == ("not finite", [])
    assert (healthy.sink.error, healthy.sink.tokens) == (None, [6])
    plan = scheduler.plan()
    assert plan is not None
    assert plan.finished == [0]
    assert [item.request_id for item in plan.decode] == [1]


def test_everybody_is_told_when_the_engine_fails() -> None:
    """Catches a client that waits for ever, and pages that stay taken."""
    scheduler = new_scheduler()
    requests = [new_request(index) for index in range(4)]
    for request in requests:
        scheduler.submit(request)
    scheduler.plan()
    scheduler.fail_all("workers are gone")
    assert [request.sink.error for request in requests] == ["workers are gone"] * 4
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    scheduler.plan()
    assert scheduler.allocator.num_free == 10


def test_unknown_requests_cannot_be_cancelled() -> None:
    """Catches a late cancel failing the engine's loop."""
    scheduler = new_scheduler()
    scheduler.cancel(5)
    scheduler.submit(new_request(0))
    scheduler.cancel(0)
    scheduler.cancel(0)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 4, "prompt: must hold at least one token"),
        (4, 0, "max_tokens: must be at least 1, got 0"),
        (20, 19, r"max_tokens: prompt and answer need 11 pages of 4 tokens, the server has 10"),
    ],
)
def test_requests_that_could_never_run_are_refused(num_prompt: int, max_tokens: int, message: str) -> None:
    """Catches a request that waits for ever, and one that decodes without a root."""
    scheduler = new_scheduler()
    with pytest.raises(ValueError, match=message):
        scheduler.submit(new_request(0, num_prompt, max_tokens))
    assert not scheduler.has_work


@pytest.mark.parametrize("shape", SHAPES)
def test_most_tokens_of_a_request_can_be_admitted(shape: TreeShape) -> None:
    """Catches a limit told to the clients that the pool does not keep, or that leaves pages unused."""
    scheduler = new_scheduler(num_pages=30, shape=shape)
    most = scheduler.max_request_tokens()
    scheduler.check_size(new_request(0, num_prompt=most - 1, max_tokens=1))
    with pytest.raises(ValueError, match="max_tokens"):
        scheduler.check_size(new_request(0, num_prompt=most, max_tokens=1))


@pytest.mark.parametrize(("max_batch_size", "max_prefill_tokens"), [(0, 1), (1, 0)])
def test_limits_below_one_are_refused(max_batch_size: int, max_prefill_tokens: int) -> None:
    """Catches an engine that plans nothing for ever."""
    with pytest.raises(ValueError, match="must be >= 1"):
        Scheduler(PageAllocator(4, 4), TreeShape(), max_batch_size, max_prefill_tokens)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("draft_depth", [1, 2, 3, 5])
def test_largest_budget_is_the_whole_pool(width: int, draft_depth: int) -> None:
    """Catches a budget that no draft can fill, or a shape refused although a draft would fill it."""
    growth = TreeGrowth(width)
    growth.start(torch.arange(width)[None], torch.zeros(1, width))
    for _ in range(draft_depth - 1):
        growth.expand(torch.arange(width).expand(1, width, width), torch.zeros(1, width, width))
    pool = growth.finish(torch.tensor([0]), torch.tensor([10_000]))
    most = int(pool.num_nodes)
    assert TreeShape(most, draft_depth, width).num_candidates == most - 1
    with pytest.raises(
        ValueError, match=rf"node_budget: {most + 1} nodes need {most} candidates.* lower it to {most} "
    ):
        TreeShape(most + 1, draft_depth, width)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 1, 1), "node_budget: must be at least 1"),
        ((4, 0, 1), "draft_depth: must be at least 1"),
        ((4, 3, 0), "width: must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused(fields: tuple[int, int, int], message: str) -> None:
    """Catches an engine that starts and then fails in its first draft."""
    with pytest.raises(ValueError, match=message):
        TreeShape(*fields)


def test_texts_end_within_the_context() -> None:
    """Catches positions past the model's RoPE table where the pool would hold more than the context."""
    scheduler = Scheduler(PageAllocator(100, 4), SHAPES[0], 2, 4, max_positions=20)
    assert scheduler.max_request_tokens() == 20
    scheduler.submit(ScheduledRequest(0, [1] * 8, SamplingParams(), 12, Sink(13)))
    with pytest.raises(ValueError, match="8 prompt tokens and 13 new ones exceed the model's context of 20"):
        scheduler.submit(ScheduledRequest(1, [1] * 8, SamplingParams(), 13, Sink(13)))


def test_a_pool_too_small_for_any_request_is_refused() -> None:
    """Catches a server that starts and then refuses every request, with a negative context."""
    with pytest.raises(ValueError, match="num_pages: 2 pages of 4 tokens hold no request"):
        Scheduler(PageAllocator(2, 4), TreeShape(8, 4, 4), 1, 1)
