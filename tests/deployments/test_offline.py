from __future__ import annotations

from collections.abc import Callable

import pytest

from eyas.deployments.offline import OfflineEngine, OfflineOutput, OfflineRequest, acceptance_length, seeded_requests
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import TreeShape
from eyas.workers.messages import AcceptedRun, StepPlan, StepResult
from eyas.workers.sampling import SamplingParams

SHAPE = TreeShape(node_budget=4, draft_depth=3, width=2)
GREEDY = SamplingParams()


class CountingWorkers:
    """Answers every request with 100, 101, 102 … in runs of `run_length` after the prompt's own token."""

    def __init__(self, run_length: int) -> None:
        self.run_length = run_length
        self.texts: dict[int, tuple[int, int, int]] = {}  # prompt length, committed, emitted
        self.plans: list[StepPlan] = []
        self.fail: Callable[[StepPlan], dict[int, str]] = lambda plan: {}

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.finished:
            self.texts.pop(request_id, None)
        errors = self.fail(plan)
        for new in plan.new:
            self.texts[new.request_id] = (len(new.prompt_ids), 0, 0)
        runs = []
        for item in plan.decode:
            runs.append(self._emit(item.request_id, self.run_length, self.run_length))
        for chunk in plan.prefill:
            num_prompt, committed, _ = self.texts[chunk.request_id]
            ends_prompt = committed + chunk.length == num_prompt
            runs.append(self._emit(chunk.request_id, chunk.length, int(ends_prompt)))
        return StepResult(plan.step, runs, errors, draft_ms=1.0, verify_ms=2.0)

    def _emit(self, request_id: int, num_committed: int, num_tokens: int) -> AcceptedRun:
        num_prompt, committed, emitted = self.texts[request_id]
        self.texts[request_id] = (num_prompt, committed + num_committed, emitted + num_tokens)
        return AcceptedRun(request_id, committed, num_committed, [100 + emitted + i for i in range(num_tokens)])


def new_engine(workers: CountingWorkers, max_batch_size: int = 2, num_pages: int = 40) -> OfflineEngine:
    return OfflineEngine(workers, PageAllocator(num_pages, 4), SHAPE, max_batch_size, max_prefill_tokens=5)


def request(num_prompt: int, max_tokens: int, stops: set[int] | None = None) -> OfflineRequest:
    return OfflineRequest([1] * num_prompt, GREEDY, max_tokens, frozenset(stops or set()))


def test_answers_end_at_limits_and_stops() -> None:
    """Catches tokens of a run kept past the limit or the stop token, and answers in order of finishing."""
    engine = new_engine(CountingWorkers(run_length=3))
    finished: list[int] = []
    outputs = engine.generate(
        [request(9, 8), request(1, 30, stops={102}), request(4, 30, stops={99, 107}), request(2, 1), request(3, 4)],
        on_finish=lambda: finished.append(1),
    )
    assert [output.token_ids for output in outputs] == [
        list(range(100, 108)),
        [100, 101, 102],
        list(range(100, 108)),
        [100],
        [100, 101, 102, 103],
    ]
    assert len(finished) == 5


def test_acceptance_length_counts_what_the_text_kept() -> None:
    """Catches the prompt's token or the tokens past the end in a figure that is compared between heads."""
    engine = new_engine(CountingWorkers(run_length=3))
    long, cut, short = engine.generate([request(9, 10), request(1, 9), request(1, 1)])
    assert (long.num_steps, long.num_step_tokens, long.acceptance_length) == (3, 9, 3.0)
    assert (cut.num_steps, cut.num_step_tokens) == (3, 8)
    assert short.acceptance_length == 0.0


def test_workers_hear_of_every_end() -> None:
    """Catches the last requests of a call staying on the workers, with their pages, until the process ends."""
    workers = CountingWorkers(run_length=2)
    engine = new_engine(workers)
    for _ in range(2):
        engine.generate([request(3, 5), request(6, 2), request(2, 9)])
        assert workers.texts == {}
    assert sorted(id_ for plan in workers.plans for id_ in plan.finished) == list(range(6))


def test_times_are_of_pure_decode_steps() -> None:
    """Catches prefill mixed into the milliseconds of a verify step."""
    workers = CountingWorkers(run_length=2)
    engine = new_engine(workers)
    engine.generate([request(3, 5), request(12, 5)])
    pure = [plan for plan in workers.plans if plan.decode and not plan.prefill]
    assert 0 < len(pure) < len(workers.plans)
    assert engine.times.num_steps == len(pure)
    assert engine.times.draft_ms == pytest.approx(1.0 * len(pure))
    assert engine.times.verify_ms == pytest.approx(2.0 * len(pure))
    assert 0 < engine.times.total_ms <= 1e3 * engine.times.elapsed_s


def test_nothing_to_generate() -> None:
    """Catches an empty prompt file failing the benchmark."""
    workers = CountingWorkers(run_length=2)
    assert new_engine(workers).generate([]) == []
    assert workers.plans == []


def test_refused_request_leaves_nothing_behind() -> None:
    """Catches the requests before a refused one being answered in the next call, under ids used twice."""
    workers = CountingWorkers(run_length=2)
    engine = new_engine(workers, num_pages=8)
    with pytest.raises(ValueError, match="max_tokens: prompt and answer need"):
        engine.generate([request(3, 5), request(3, 500)])
    assert workers.plans == []
    (output,) = engine.generate([request(3, 3)])
    assert output.token_ids == [100, 101, 102]
    assert [new.request_id for plan in workers.plans for new in plan.new] == [output.request_id]


@pytest.mark.parametrize("kind", ["error of one request", "workers raise"])
def test_failed_call_leaves_nothing_behind(kind: str) -> None:
    """Catches requests of a failed call that go on in the next one and hold its pages."""
    workers = CountingWorkers(run_length=2)
    engine = new_engine(workers, num_pages=16)

    def fail(plan: StepPlan) -> dict[int, str]:
        if not plan.decode:
            return {}
        if kind == "workers raise":
            raise ConnectionError("gone")
        return {plan.decode[0].request_id: "not finite"}

    workers.fail = fail
    with pytest.raises((RuntimeError, ConnectionError), match="not finite|gone"):
        engine.generate([request(3, 9), request(2, 9), request(2, 9)])
    workers.fail = lambda plan: {}
    outputs = engine.generate([request(3, 3), request(12, 12), request(1, 2)])
    assert [output.token_ids for output in outputs] == [[100, 101, 102], list(range(100, 112)), [100, 101]]
    assert workers.texts == {}


def test_a_result_of_another_step_is_refused() -> None:
    """Catches tokens of an interrupted call taken for those of the next one's requests."""

    class LateWorkers(CountingWorkers):
        def step(self, plan: StepPlan) -> StepResult:
            return StepResult(plan.step - 1, super().step(plan).runs)

    with pytest.raises(RuntimeError, match="result of step 0 arrived for step 1"):
        new_engine(LateWorkers(run_length=2)).generate([request(3, 5)])


def test_every_prompt_has_a_seed_of_its_own() -> None:
    """Catches the same noise under all prompts of a file, and a limit or a stop token lost on the way."""
    requests = seeded_requests([[1], [2, 3]], 0.5, 7, 9, frozenset({4}))
    assert requests == [
        OfflineRequest([1], SamplingParams(0.5, 1.0, 7), 9, frozenset({4})),
        OfflineRequest([2, 3], SamplingParams(0.5, 1.0, 8), 9, frozenset({4})),
    ]


def test_mean_acceptance_weighs_steps_alike() -> None:
    """Catches a mean of means, in which a short answer counts as much as a long one."""
    outputs = [OfflineOutput(0, num_steps=1, num_step_tokens=4), OfflineOutput(1, num_steps=9, num_step_tokens=16)]
    assert acceptance_length(outputs) == 2.0
    assert acceptance_length([OfflineOutput(0)]) == 0.0
