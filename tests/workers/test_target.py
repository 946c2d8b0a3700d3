"""The target's step against drafts that are right on purpose, so that long paths are accepted, from any sibling."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.kernel_set import REFERENCE_KERNELS
from eyas.kernels.noise import gumbel_noise, stream_key
from eyas.models.attention import Attention
from eyas.models.llama import load_decoder
from eyas.models.parallel import TensorParallel
from eyas.workers.buckets import GraphLimits
from eyas.workers.graphs import EagerRecorder
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.messages import AcceptedRun, DecodeItem, NewRequest, PrefillChunk, StepPlan
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends
from eyas.workers.target import TargetRunner, VerifiedStep

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job, Models

NewAttention = Callable[[], Attention]
RunRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]
Tree = tuple[list[int], list[int]]

VOCAB_SIZE = 61
TOLERANCE = 1e-5  # float32; rows of a tree, a chunk and a whole text sum in other orders


def random_tree(future: list[int], num_nodes: int, draft_depth: int, rng: random.Random) -> tuple[Tree, int]:
    """A tree over the root `future[0]` that holds the true tokens after it for some levels, among random nodes.

    Returns the tree and how many true tokens it holds in a row.
    """
    num_true = rng.randint(0, min(num_nodes - 1, draft_depth, len(future) - 1))
    tokens, parents, depths = [future[0]], [-1], [0]
    last_true, planted = 0, 0

    def add(parent: int, token: int) -> int:
        same = [i for i in range(len(tokens)) if parents[i] == parent and tokens[i] == token]
        if same:
            return same[0]
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        return len(tokens) - 1

    while len(tokens) < num_nodes and (planted < num_true or rng.random() < 0.95):
        is_last_chance = num_nodes - len(tokens) <= num_true - planted
        if planted < num_true and (is_last_chance or rng.random() < 0.4):
            planted += 1
            last_true = add(last_true, future[planted])
        else:
            add(rng.choice([i for i in range(len(tokens)) if depths[i] < draft_depth]), rng.randrange(VOCAB_SIZE))
    return (tokens, parents), planted


class Prophet:
    """A drafter that knows every answer in advance; drafts from it and notes how much must be accepted."""

    def __init__(self, prompt_to_text: dict[tuple[int, ...], list[int]], rng: random.Random) -> None:
        self.prompt_to_text = prompt_to_text
        self.rng = rng
        self.texts: dict[int, list[int]] = {}
        self.num_known: dict[int, int] = {}
        self.num_planted: dict[int, int] = {}
        self.num_accepted: list[int] = []
        self.features: dict[int, list[Tensor]] = {}

    def update_requests(self, plan: StepPlan) -> None:
        for new in plan.new:
            self.texts[new.request_id] = new.prompt_ids + self.prompt_to_text[tuple(new.prompt_ids)]

    def draft(self, plan: StepPlan) -> dict[int, Tree]:
        trees = {}
        for item in plan.decode:
            future = self.texts[item.request_id][self.num_known[item.request_id] :]
            tree, self.num_planted[item.request_id] = random_tree(future, item.num_nodes, plan.draft_depth, self.rng)
            if self.rng.random() < 0.9:
                trees[item.request_id] = tree
            else:
                self.num_planted[item.request_id] = 0  # no tree at all is plain decoding
        return trees

    def extend(self, runs: list[AcceptedRun], features: Tensor) -> None:
        assert features.shape[0] == sum(run.num_committed for run in runs)
        parts = features.split([run.num_committed for run in runs])
        for run, part in zip(runs, parts, strict=True):
            self.features.setdefault(run.request_id, []).append(part)
            self.num_known[run.request_id] = run.start + run.num_committed
            planted = self.num_planted.pop(run.request_id, 0)
            if run.tokens:
                assert len(run.tokens) > planted
                self.num_accepted.append(len(run.tokens) - 1)


@pytest.fixture(scope="module")
def prompt_to_text(
    models: Models, jobs: list[Job], new_generation: type[Generation]
) -> dict[tuple[int, ...], list[int]]:
    """Answers longer than any job asks for, so that a draft near the end is right, too."""
    generation = new_generation(models.workers(PoolLayout(80, 16), None), TreeShape())
    for job in jobs:
        generation.submit(type(job)(job.prompt_ids, job.sampling, job.max_tokens + 12))
    return {tuple(job.prompt_ids): text for job, text in zip(jobs, generation.run(), strict=True)}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_nodes", "draft_depth"), [(2, 1), (6, 5), (9, 3), (16, 5), (12, 2)])
def test_right_drafts_are_accepted(
    num_nodes: int,
    draft_depth: int,
    page_size: int,
    models: Models,
    jobs: list[Job],
    plain_texts: list[list[int]],
    prompt_to_text: dict[tuple[int, ...], list[int]],
    new_generation: type[Generation],
) -> None:
    """Catches a right draft refused, a path of scattered nodes moved wrongly, and features of other rows published."""
    rng = random.Random(1000 * num_nodes + page_size)
    prophet = Prophet(prompt_to_text, rng)
    layout = PoolLayout(448 // page_size, page_size)
    # A shape of this width lets the scheduler grant any tree of so many nodes.
    generation = new_generation(
        LocalWorkers(models.target_runner(layout), prophet),
        TreeShape(num_nodes, draft_depth, width=num_nodes),
        max_batch_size=4,
        max_prefill_tokens=rng.choice([3, 7, 512]),
    )
    for job in jobs:
        generation.submit(job)
    for step, plan in enumerate(generation.steps()):
        alive = [item.request_id for item in plan.decode if not generation.requests[item.request_id].is_over]
        if alive and step % 3 == 0:
            request_id = rng.choice(alive)
            running = generation.requests[request_id]
            committed = running.num_committed
            expected = models.recompute(running.text[:committed], running.text[committed])
            slots = layout.slots_of(running.pages)[:committed]
            for cache, reference in zip(
                generation.workers.target.pool.caches, expected.target_pool.caches, strict=True
            ):
                torch.testing.assert_close(cache[slots], reference[: len(slots)], rtol=TOLERANCE, atol=TOLERANCE)
            features = torch.cat(prophet.features[request_id])
            torch.testing.assert_close(features, expected.features, rtol=TOLERANCE, atol=TOLERANCE)
    texts = [running.emitted[: running.job.max_tokens] for running in generation.requests.values()]
    assert texts == plain_texts
    assert max(prophet.num_accepted) == draft_depth
    assert generation.workers.target.num_granted_pages == 0


@torch.inference_mode()
def test_plain_text_is_the_models_own(
    models: Models, jobs: list[Job], plain_texts: list[list[int]], text_attention: NewAttention
) -> None:
    """Catches noise of another position, and pages or chunks that change what the model sees, in plain decoding."""
    target = models.target
    for job, text in zip(jobs, plain_texts, strict=True):
        token_ids = torch.tensor(job.prompt_ids + text)
        hidden = target(token_ids, torch.arange(len(token_ids)), text_attention()).hidden
        logits = target.logits(hidden)[len(job.prompt_ids) - 1 : -1]
        sampling = job.sampling
        if sampling.temperature > 0:
            logits = logits / sampling.temperature
            probs, order = logits.softmax(-1).sort(descending=True)
            rest = torch.ones_like(probs).scatter(1, order, (probs.cumsum(-1) - probs >= sampling.top_p).float())
            keys = [stream_key(sampling.seed, len(job.prompt_ids) + index) for index in range(len(text))]
            noise = gumbel_noise(keys, torch.arange(VOCAB_SIZE))
            logits = logits.masked_fill(rest.bool() & (sampling.top_p < 1), -torch.inf) + noise
        assert logits.argmax(-1).tolist() == text


SCRIPTED_JOBS = [([3, 9, 27, 1, 4], SamplingParams()), ([8, 2, 6], SamplingParams(1.0, 0.9, seed=4))]


@torch.inference_mode()
def scripted_steps(target: TargetRunner) -> list[VerifiedStep]:
    """A prompt in two chunks beside a decoding request, then trees of both that a rank by itself could never guess."""
    new = [NewRequest(index, *job) for index, job in enumerate(SCRIPTED_JOBS)]
    steps = [target.step(StepPlan(1, new[1:], {1: [4, 5, 1]}, prefill=[PrefillChunk(1, 3)]), {})]
    root = steps[0].runs[0].tokens[0]
    plan = StepPlan(2, new[:1], {0: [0, 2, 3]}, prefill=[PrefillChunk(0, 2)], decode=[DecodeItem(1, 3)], draft_depth=2)
    steps.append(target.step(plan, {1: ([root, 5, 7], [-1, 0, 0])}))
    steps.append(target.step(StepPlan(3, prefill=[PrefillChunk(0, 3)], decode=[DecodeItem(1, 1)]), {}))
    roots = [steps[2].runs[1].tokens[-1], steps[2].runs[0].tokens[-1]]
    decode = [DecodeItem(0, 4), DecodeItem(1, 16)]
    trees = {
        0: ([roots[0], 5, 6, 7], [-1, 0, 1, 0]),
        1: ([roots[1], *range(VOCAB_SIZE)], [-1] + [0] * VOCAB_SIZE),  # whatever the token is, it is accepted
    }
    steps.append(target.step(StepPlan(4, decode=decode, draft_depth=2), trees))
    return steps


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_decide_as_one(size: int, is_recorded: bool, tiny_models: TinyModels, run_ranks: RunRanks) -> None:
    """Catches ranks that choose for themselves and diverge, and caches that hold other ranks' heads."""
    folder = tiny_models.target(
        hidden_size=48, num_attention_heads=12, num_key_value_heads=6, vocab_size=VOCAB_SIZE, layer_gain=0.3
    )
    layout = PoolLayout(num_pages=12, page_size=32)

    def run(parallel: TensorParallel) -> tuple[list[VerifiedStep], TargetRunner]:
        model = load_decoder(folder, torch.float32, torch.device("cpu"), parallel)
        if parallel.rank > 0:  # its own choice would be token 0 everywhere
            joined_logits = model.logits
            model.logits = lambda hidden: torch.zeros_like(joined_logits(hidden))
        runner = TargetRunner(model, layout, (1, 3))
        if is_recorded and parallel.size > 1:
            runner.record_graphs(GraphLimits(2, VOCAB_SIZE + 1, 2, layout.num_pages, 1), EagerRecorder())
        return scripted_steps(runner), runner

    whole, whole_runner = run(TensorParallel())
    assert len(whole[-1].runs[1].tokens) == 2
    ranks = run_ranks(size, run)
    for steps, _ in ranks:
        for step, expected in zip(steps, whole, strict=True):
            assert step.runs == expected.runs
            torch.testing.assert_close(step.features, expected.features, rtol=1e-4, atol=1e-4)
    for index, cache in enumerate(whole_runner.pool.caches):
        joined = torch.cat([runner.pool.caches[index] for _, runner in ranks], dim=1)
        granted = slice(layout.num_slots)  # what lies past it is scratch
        torch.testing.assert_close(joined[granted], cache[granted], rtol=1e-4, atol=1e-4)


def test_features_are_published_only_when_asked_for(models: Models) -> None:
    """Catches an engine without a head that pays for features nobody reads, or fails for want of them."""
    runner = TargetRunner(models.target, PoolLayout(12, 32), ())
    assert [step.features for step in scripted_steps(runner)] == [None] * 4
    with_features = scripted_steps(models.target_runner(PoolLayout(12, 32)))
    for step in with_features:
        assert step.features is not None
        assert step.features.shape == (sum(run.num_committed for run in step.runs), 96)
    assert [step.runs for step in with_features] == [
        step.runs for step in scripted_steps(TargetRunner(models.target, PoolLayout(12, 32), ()))
    ]


def test_step_without_rows(models: Models) -> None:
    """Catches a plan that only forgets requests failing, or leaving their pages behind."""
    runner = models.target_runner(PoolLayout(12, 32))
    scripted_steps(runner)
    assert runner.num_granted_pages == 6
    step = runner.step(StepPlan(5, finished=[0, 1]), {})
    assert (step.runs, step.errors, step.features) == ([], {}, None)
    assert runner.num_granted_pages == 0
    runner.step(StepPlan(6, finished=[0, 99]), {})


def prefilled(models: Models, layout: PoolLayout, pages: list[int]) -> TargetRunner:
    runner = models.target_runner(layout)
    request = NewRequest(0, [1, 2, 3], SamplingParams())
    runner.step(StepPlan(1, [request], {0: pages}, prefill=[PrefillChunk(0, 3)]), {})
    return runner


def test_broken_trees_are_errors(models: Models) -> None:
    """Catches a node with a missing parent being verified as if it followed the root."""
    runner = prefilled(models, PoolLayout(4, 16), [0])
    plan = StepPlan(2, decode=[DecodeItem(0, 3)], draft_depth=2)
    with pytest.raises(ValueError, match="node 1 names parent 2"):
        runner.step(plan, {0: ([5, 6, 7], [-1, 2, 0])})
    with pytest.raises(ValueError, match="two children with token 6"):
        runner.step(plan, {0: ([5, 6, 6], [-1, 0, 0])})


def test_too_few_pages_are_an_error(models: Models) -> None:
    """Catches a tree that runs over its pages into another request's."""
    runner = prefilled(models, PoolLayout(4, 4), [2])
    with pytest.raises(RuntimeError, match="position 5 lies beyond the 4 slots"):
        runner.step(StepPlan(2, decode=[DecodeItem(0, 3)], draft_depth=2), {0: ([5, 6, 7], [-1, 0, 1])})


def test_decoding_before_the_prompt_is_through_is_an_error(models: Models) -> None:
    """Catches a root that does not exist."""
    runner = models.target_runner(PoolLayout(4, 16))
    request = NewRequest(0, [1, 2, 3], SamplingParams())
    runner.step(StepPlan(1, [request], {0: [0]}, prefill=[PrefillChunk(0, 2)]), {})
    with pytest.raises(RuntimeError, match="before its prompt is through"):
        runner.step(StepPlan(2, decode=[DecodeItem(0, 1)]), {})


def test_paths_of_many_requests_are_moved_request_by_request(models: Models) -> None:
    """Catches the rows of a whole step handed over as those of one request, of which a backend takes only so many."""
    shapes = []

    def compact(caches: Tensor, source_slots: Tensor, destination_slots: Tensor) -> None:
        shapes.append(tuple(source_slots.shape))
        REFERENCE_KERNELS.compact(caches, source_slots, destination_slots)

    backends = StepBackends(replace(REFERENCE_KERNELS, compact=compact))
    runner = TargetRunner(models.target, PoolLayout(num_pages=80, page_size=4), (), backends)
    ids = range(70)
    new = [NewRequest(index, [index % VOCAB_SIZE], SamplingParams()) for index in ids]
    plan = StepPlan(1, new, {index: [index] for index in ids}, prefill=[PrefillChunk(index, 1) for index in ids])
    roots = [run.tokens[0] for run in runner.step(plan, {}).runs]
    trees = {index: ([roots[index], 1, 2], [-1, 0, 0]) for index in ids}
    runs = runner.step(StepPlan(2, decode=[DecodeItem(index, 3) for index in ids], draft_depth=1), trees).runs
    assert shapes == [(70, max(run.num_committed for run in runs))]
