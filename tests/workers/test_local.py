"""Speculation changes how fast the text comes, never the text nor what the caches hold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from eyas.deployments.scheduler import TreeShape
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.llama import load_decoder
from eyas.models.target_weights import TargetWeights
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.loading import EngineSpec, load_drafter, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.paged_attention import text_attention
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job, Models, Running

CACHE_TOLERANCE = 1e-5  # float32; rows computed in a tree, a chunk and a whole text sum in other orders
NEAR_TIE = 0.3  # logits of these models reach about 10, where bfloat16 counts in steps of 1 / 16
PAGE_SIZES = [1, 16, 64]
CHUNKS = [3, 7, 512]


def head_of(models: Models, name: str) -> Eagle3Head:
    return {"random head": models.random_head, "guessing head": models.guessing_head}[name]


def pool_layout(page_size: int) -> PoolLayout:
    """A pool that holds about three of the jobs, so that requests also wait for pages and pages are reused."""
    return PoolLayout(num_pages=360 // page_size, page_size=page_size)


def check_caches(models: Models, generation: Generation, running: Running) -> None:
    """Compare a request's committed rows with a prefill of the same text, and both sides' lengths."""
    workers, num_committed = generation.workers, running.num_committed
    token_ids, root = running.text[:num_committed], running.text[num_committed]
    expected = models.recompute(token_ids, root)
    slots = workers.target.layout.slots_of(running.pages)[:num_committed]
    check_pool(workers.target.pool, expected.target_pool, slots)
    if isinstance(workers.drafter, DraftRunner):
        check_pool(workers.drafter.pool, expected.draft_pool, slots)


def check_pool(pool: KVPool, expected: KVPool, slots: torch.Tensor) -> None:
    for cache, reference in zip(pool.caches, expected.caches, strict=True):
        torch.testing.assert_close(cache[slots], reference[: len(slots)], rtol=CACHE_TOLERANCE, atol=CACHE_TOLERANCE)


def check_lengths(generation: Generation) -> None:
    """Both sides cover the same positions of every request they hold."""
    target, drafter = generation.workers.target, generation.workers.drafter
    assert isinstance(drafter, DraftRunner)
    assert target._requests.keys() == drafter._requests.keys()
    for request_id, request in target._requests.items():
        drafting = drafter._requests[request_id]
        assert drafting.num_covered == request.num_committed
        assert drafting.root == (-1 if request.root is None else request.root)


@pytest.mark.parametrize("draft_depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("head", ["random head", "guessing head"])
def test_speculation_writes_the_plain_text(
    head: str,
    width: int,
    draft_depth: int,
    models: Models,
    jobs: list[Job],
    plain_texts: list[list[int]],
    new_generation: type[Generation],
) -> None:
    """Catches anything that lets a draft change the text, in batches that requests join and leave at any step."""
    rng = random.Random(f"{head} {width} {draft_depth}")
    most_nodes = min(16, width + (draft_depth - 1) * width**2 + 1)
    chosen = rng.sample(range(len(jobs)), rng.randint(1, 6))
    generation = new_generation(
        models.workers(pool_layout(rng.choice(PAGE_SIZES)), head_of(models, head)),
        TreeShape(rng.randint(1, most_nodes), draft_depth, width),
        max_batch_size=rng.randint(1, 5),
        max_prefill_tokens=rng.choice(CHUNKS),
        is_ahead=rng.random() < 0.5,
    )
    waiting = list(chosen)
    generation.submit(jobs[waiting.pop(0)])
    for _ in generation.steps():
        while waiting and rng.random() < 0.4:
            generation.submit(jobs[waiting.pop(0)])
        check_lengths(generation)
    for index in waiting:
        generation.submit(jobs[index])
    assert generation.run() == [plain_texts[index] for index in chosen]
    assert generation.workers.target.num_granted_pages == 0
    assert generation.workers.drafter.num_granted_pages == 0


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("max_prefill_tokens", CHUNKS)
@pytest.mark.parametrize(("node_budget", "draft_depth", "width"), [(16, 5, 4), (5, 4, 1), (4, 1, 3)])
def test_caches_equal_a_prefill_of_the_text(
    node_budget: int,
    draft_depth: int,
    width: int,
    max_prefill_tokens: int,
    page_size: int,
    is_ahead: bool,
    models: Models,
    jobs: list[Job],
    new_generation: type[Generation],
) -> None:
    """Catches accepted rows left where they were drafted, guesses left in the drafter's cache, and torn chunks."""
    generation = new_generation(
        models.workers(pool_layout(page_size), models.guessing_head),
        TreeShape(node_budget, draft_depth, width),
        max_batch_size=4,
        max_prefill_tokens=max_prefill_tokens,
        is_ahead=is_ahead,
    )
    rng = random.Random(page_size)
    for job in rng.sample(jobs, 5):
        generation.submit(job)
    num_checked = 0
    for step, _ in enumerate(generation.steps()):
        known = [
            running
            for running in generation.requests.values()
            if not running.is_over and running.num_committed >= len(running.job.prompt_ids)
        ]
        if known and step % 3 == 0:
            check_caches(models, generation, rng.choice(known))
            num_checked += 1
    assert num_checked > 3


@pytest.mark.parametrize(("node_budget", "draft_depth", "width"), [(16, 5, 4), (13, 4, 3), (6, 5, 1), (3, 1, 2)])
def test_drafts_are_accepted(
    node_budget: int,
    draft_depth: int,
    width: int,
    models: Models,
    jobs: list[Job],
    new_generation: type[Generation],
) -> None:
    """Catches a drafter that is wrong but harmless, and tests of losslessness that never accept or move anything."""
    workers = models.workers(pool_layout(16), models.guessing_head)
    generation = new_generation(workers, TreeShape(node_budget, draft_depth, width))
    moved: list[bool] = []
    compact_paths = workers.target._compact_paths

    def note_paths(runs: list, batch: object, accepted: object) -> None:
        for row, run in enumerate(runs):
            path = accepted.path[row, : run.num_committed].tolist()
            moved.append(path != list(range(len(path))))
        compact_paths(runs, batch, accepted)

    workers.target._compact_paths = note_paths
    for job in jobs:
        generation.submit(job)
    generation.run()
    num_accepted = [len(run.tokens) - 1 for run in generation.decode_runs]
    assert sum(num_accepted) > 0.5 * len(num_accepted)
    assert max(num_accepted) == draft_depth
    assert any(moved) == (width > 1)


def test_seed_decides_the_text(models: Models, jobs: list[Job], new_generation: type[Generation]) -> None:
    """Catches noise keyed by request number or batch row, which would make a repeated request another text."""

    def texts(seeds: list[int]) -> list[list[int]]:
        generation = new_generation(models.workers(pool_layout(16), models.guessing_head), TreeShape(8, 3, 2))
        for seed in seeds:
            sampling = SamplingParams(temperature=1.0, seed=seed)
            generation.submit(type(jobs[0])(jobs[3].prompt_ids, sampling, max_tokens=12))
        return generation.run()

    first, second, third, fourth = texts([5, 6, 5, 7])
    assert first == third
    assert len({tuple(first), tuple(second), tuple(fourth)}) == 3
    assert texts([7]) == [fourth]


def test_cancelled_request_leaves_the_others_alone(
    models: Models, jobs: list[Job], plain_texts: list[list[int]], new_generation: type[Generation]
) -> None:
    """Catches rows of a request that left being kept, or its pages going to the next while it is still written."""
    generation = new_generation(
        models.workers(pool_layout(16), models.guessing_head), TreeShape(12, 4, 3), max_batch_size=3, is_ahead=True
    )
    running = [generation.submit(job) for job in jobs]
    rng = random.Random(3)
    for _ in generation.steps():
        alive = [request for request in running if not request.is_over]
        if alive and rng.random() < 0.1:
            generation.cancel(rng.choice(alive))
    num_whole = 0
    for request, text in zip(running, plain_texts, strict=True):
        assert request.emitted[: len(text)] == text[: len(request.emitted)]
        num_whole += len(request.emitted) >= len(text)
    assert 2 < num_whole < len(running)
    assert generation.workers.target.num_granted_pages == generation.workers.drafter.num_granted_pages == 0


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in turn", "ahead"])
def test_logits_that_are_not_finite_fail_their_request_alone(
    is_ahead: bool, tiny_models: TinyModels, jobs: list[Job], new_generation: type[Generation]
) -> None:
    """Catches a NaN that spreads to the batch, takes the engine down, or is argmaxed into a token."""
    folder = tiny_models.target(layer_gain=0.3)
    target = load_decoder(folder, torch.float32, torch.device("cpu"))
    head_folder = tiny_models.head(folder, draft_vocab_size=15)
    head = load_head(head_folder, TargetWeights(folder, target.config), torch.float32, torch.device("cpu"))
    assert isinstance(head, Eagle3Head)

    def generate(jobs: list[Job]) -> list[Running]:
        layout = pool_layout(16)
        workers = LocalWorkers(TargetRunner(target, layout, head.config.aux_layers), DraftRunner(head, layout))
        generation = new_generation(workers, TreeShape(8, 3, 3), max_batch_size=4, is_ahead=is_ahead)
        running = [generation.submit(job) for job in jobs]
        generation.run()
        assert workers.target.num_granted_pages == workers.drafter.num_granted_pages == 0
        return running

    healthy = generate(jobs[1:5])
    used = {token for running in healthy for token in running.text} | set(head.candidate_ids.tolist())
    poison = min(set(range(61)) - used)
    target.embedding.data[poison] = torch.nan
    sick = type(jobs[0])([3, poison, 4], SamplingParams(temperature=1.0, top_p=0.9, seed=1))
    others = generate([*jobs[1:3], sick, *jobs[3:5]])
    failed = others.pop(2)
    assert failed.error == "the model produced logits that are not finite (NaN or infinity)"
    assert failed.emitted == []
    for running, alone in zip(others, healthy, strict=True):
        assert running.error is None
        assert running.emitted == alone.emitted


def test_plan_without_rows_only_forgets(models: Models, jobs: list[Job], new_generation: type[Generation]) -> None:
    """Catches the last finished request being kept for ever, or a step over nothing failing."""
    generation = new_generation(models.workers(pool_layout(16), models.random_head), TreeShape(4, 2, 2))
    generation.submit(jobs[0])
    plans = list(generation.steps())
    assert plans[-1].finished == [0]
    assert not plans[-1].decode
    assert not plans[-1].prefill
    assert generation.workers.target.num_granted_pages == generation.workers.drafter.num_granted_pages == 0


def test_bfloat16_diverges_only_at_near_ties(models: Models, jobs: list[Job], new_generation: type[Generation]) -> None:
    """Catches a divergence that rounding does not explain, in the dtype and packed layout that are served."""
    spec = EngineSpec(str(models.target_folder), str(models.head_folder), "bfloat16", "cpu", 24, 16, num_threads=1)
    greedy = [type(job)(job.prompt_ids, SamplingParams(), max_tokens=24) for job in jobs]

    def texts(drafter: DraftRunner | None, shape: TreeShape) -> list[list[int]]:
        generation = new_generation(LocalWorkers(load_target(spec), drafter), shape, max_batch_size=4)
        for job in greedy:
            generation.submit(job)
        return generation.run()

    num_equal = 0
    for job, plain, speculative in zip(
        greedy, texts(None, TreeShape()), texts(load_drafter(spec), TreeShape(12, 4, 3)), strict=True
    ):
        differs = [index for index in range(24) if plain[index] != speculative[index]]
        if not differs:
            num_equal += 1
            continue
        logits = next_logits(models, job.prompt_ids + plain[: differs[0]])
        assert abs(float(logits[plain[differs[0]]] - logits[speculative[differs[0]]])) < NEAR_TIE
        assert float(logits.max() - logits[plain[differs[0]]]) < NEAR_TIE
    assert num_equal > len(greedy) / 2


def next_logits(models: Models, token_ids: list[int]) -> torch.Tensor:
    """Float32 logits after a text, `[V]`."""
    layout = PoolLayout(len(token_ids), 1)
    rows = torch.arange(len(token_ids))
    pool = models.target_runner(layout).pool
    attention = text_attention(pool, models.target.config.num_heads, rows)
    with torch.inference_mode():
        return models.target.logits(models.target(torch.tensor(token_ids), rows, attention).hidden[-1:])[0]
