"""The drafter against a tree grown by hand: no pages, no batch, every path run through the head from the start."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.noise import gumbel_noise, stream_key
from eyas.kernels.static_tree import TreeChoices
from eyas.models.attention import Attention
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.messages import AcceptedRun, DecodeItem, NewRequest, PrefillChunk, StepPlan
from eyas.workers.sampling import SamplingParams

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job, Models

NewAttention = Callable[[], Attention]
Tree = tuple[list[int], list[int]]

LAYOUT = PoolLayout(num_pages=60, page_size=4)


class HandGrowth:
    """Grows one request's tree as EAGLE-2 describes it, with the candidates ranked under the request's noise."""

    def __init__(
        self, head: Eagle3Head, features: Tensor, text: list[int], sampling: SamplingParams, attention: NewAttention
    ) -> None:
        """`features [n, A * H]` of the committed text, whose root is `text[n]`."""
        self.head = head
        self.features = features
        self.num_committed = features.shape[0]
        self.text = text[: self.num_committed + 1]
        self.sampling = sampling
        self.attention = attention

    def tree(self, width: int, draft_depth: int, num_nodes: int) -> Tree:
        pool: list[tuple[float, list[int]]] = []  # score and path of every candidate, level by level
        survivors: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(draft_depth):
            level = [
                (score + log_prob, [*path, token])
                for score, path in survivors
                for token, log_prob in self.candidates(path, width)
            ]
            pool += level
            survivors = sorted(level, key=lambda candidate: -candidate[0])[:width]
        best = sorted(range(len(pool)), key=lambda index: -pool[index][0])[: num_nodes - 1]
        paths = [[], *(pool[index][1] for index in sorted(best))]
        tokens = [self.text[-1], *(path[-1] for path in paths[1:])]
        return tokens, [-1, *(paths.index(path[:-1]) for path in paths[1:])]

    def candidates(self, path: list[int], width: int) -> list[tuple[int, float]]:
        """Best tokens after a drafted path, with the log-softmax of their perturbed scores."""
        scores = self.head.logits(self.state_after(path))[0]
        if self.sampling.temperature > 0:
            key = stream_key(self.sampling.seed, self.num_committed + len(path) + 1)
            scores = scores / self.sampling.temperature
            if self.sampling.top_p < 1:
                scores = scores.masked_fill(~in_nucleus(scores, self.sampling.top_p), -torch.inf)
            scores = scores + gumbel_noise([key], self.head.candidate_ids)[0]
        log_probs = scores.log_softmax(-1)
        best = log_probs.topk(width)
        return [
            (int(self.head.candidate_ids[column]), float(log_prob))
            for column, log_prob in zip(best.indices, best.values, strict=True)
        ]

    def state_after(self, path: list[int]) -> Tensor:
        attention, length = self.attention(), self.num_committed
        tokens, positions = torch.tensor(self.text[1:]), torch.arange(length)
        states = self.head.extend(self.features, tokens, positions, attention)[-1:]
        for step, token in enumerate(path):
            states = self.head.step(states, torch.tensor([token]), torch.tensor([length + step]), attention)
        return states


def in_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Likeliest tokens until their probability reaches `top_p`."""
    probs, order = scores.softmax(-1).sort(descending=True)
    num_kept = int((probs.cumsum(0) < top_p).sum()) + 1
    return torch.zeros_like(scores, dtype=torch.bool).index_fill(0, order[:num_kept], True)


def two_layer_head(models: Models, tiny_models: TinyModels, **options: Any) -> Eagle3Head:
    folder = tiny_models.head(models.target_folder, draft_vocab_size=55, num_hidden_layers=2, **options)
    sizes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (40, 32),
        "mlp.up_proj": (40, 32),
        "mlp.down_proj": (32, 40),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    folder = tiny_models.changed(folder, {f"layers.1.{name}.weight": shape for name, shape in sizes.items()})
    head = load_head(
        folder, TargetWeights(models.target_folder, models.target.config), torch.float32, models.target.device
    )
    assert isinstance(head, Eagle3Head)
    return head


@pytest.fixture(scope="module")
def windowed_head(models: Models, tiny_models: TinyModels) -> Eagle3Head:
    """Two layers that see three positions each."""
    return two_layer_head(models, tiny_models, sliding_window=3)


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize(
    ("width", "draft_depth", "num_nodes"),
    [(1, 1, 2), (1, 5, 6), (1, 4, 3), (2, 3, 7), (3, 1, 4), (3, 4, 16), (4, 5, 12)],
)
@pytest.mark.parametrize("head", ["random", "guessing", "windowed"])
def test_trees_equal_trees_grown_by_hand(
    head: str,
    width: int,
    draft_depth: int,
    num_nodes: int,
    sampling: str,
    models: Models,
    jobs: list[Job],
    new_generation: type[Generation],
    text_attention: NewAttention,
    windowed_head: Eagle3Head,
) -> None:
    """Catches a node that sees a sibling or misses an ancestor, a wrong position, and noise of another position.

    With width 1 the tree grown by hand is the chain of the head's best guesses.
    """
    heads = {"random": models.random_head, "guessing": models.guessing_head, "windowed": windowed_head}
    head_module = heads[head]
    workers = models.workers(LAYOUT, head_module)
    chosen = [job for job in jobs if (job.sampling.temperature > 0) == (sampling == "sampled")][:3]
    generation = new_generation(workers, TreeShape(num_nodes, draft_depth, width), max_prefill_tokens=16)
    drafter = workers.drafter
    assert isinstance(drafter, DraftRunner)
    drafted: list[dict[int, Tree]] = []
    before: list[dict[int, int]] = []
    draft = drafter.draft

    def draft_and_note(plan: StepPlan) -> dict[int, Tree]:
        before.append({request_id: running.num_committed for request_id, running in generation.requests.items()})
        drafted.append(draft(plan))
        return drafted[-1]

    drafter.draft = draft_and_note
    for job in chosen:
        generation.submit(job)
    generation.run()
    rng = random.Random(0)
    steps = [step for step, trees in enumerate(drafted) if len(trees) > 1]
    with torch.inference_mode():
        for step in rng.sample(steps, 2):
            for request_id, tree in drafted[step].items():
                running, committed = generation.requests[request_id], before[step][request_id]
                features = models.recompute(running.text[:committed], running.text[committed]).features
                by_hand = HandGrowth(head_module, features, running.text, running.job.sampling, text_attention)
                assert tree == by_hand.tree(width, draft_depth, num_nodes)


def start(runner: DraftRunner, models: Models, request_id: int, job: Job, pages: list[int], chunks: list[int]) -> int:
    """Take a prompt in through `chunks` with true features; returns the root."""
    plan = StepPlan(1, [NewRequest(request_id, job.prompt_ids, job.sampling)], {request_id: pages})
    runner.update_requests(plan)
    root = 7
    features = models.recompute(job.prompt_ids, root).features
    first = 0
    for length in chunks:
        stop = first + length
        tokens = [root] if stop == len(job.prompt_ids) else []
        runner.extend([AcceptedRun(request_id, first, length, tokens)], features[first:stop])
        first = stop
    return root


@pytest.mark.parametrize("chunks", [[1] * 16, [3, 3, 3, 3, 3, 1], [15, 1], [7, 9]])
def test_chunked_prompt_equals_whole(chunks: list[int], models: Models, jobs: list[Job]) -> None:
    """Catches the last pair of a chunk taking a made-up token instead of the next prompt token."""
    job = next(job for job in jobs if len(job.prompt_ids) == 16)
    runner = DraftRunner(models.random_head, LAYOUT)
    root = start(runner, models, 0, job, [5, 3, 8, 4, 2, 1], chunks)
    slots = LAYOUT.slots_of([5, 3, 8, 4])
    expected = models.recompute(job.prompt_ids, root).draft_pool
    for cache, reference in zip(runner.pool.caches, expected.caches, strict=True):
        torch.testing.assert_close(cache[slots], reference[: len(slots)], rtol=1e-5, atol=1e-5)


def decode_plan(*request_ids: int, num_nodes: int = 8, width: int = 3, draft_depth: int = 3) -> StepPlan:
    items = [DecodeItem(request_id, num_nodes) for request_id in request_ids]
    return StepPlan(9, decode=items, draft_depth=draft_depth, width=width)


@pytest.mark.parametrize("layer_types", [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_windows_end_at_positions(
    window: int,
    layer_types: list[str],
    models: Models,
    tiny_models: TinyModels,
    jobs: list[Job],
    text_attention: NewAttention,
) -> None:
    """Catches a window counted in nodes of the tree, which a grown tree seldom shows: its deep nodes are cut off."""
    head = two_layer_head(models, tiny_models, sliding_window=window, layer_types=layer_types)
    choices = TreeChoices.cartesian([3, 2, 2, 1, 1])
    runner = DraftRunner(head, LAYOUT, choices=choices)
    roots = [
        start(
            runner, models, request_id, job, list(range(request_id * 20, request_id * 20 + 20)), [len(job.prompt_ids)]
        )
        for request_id, job in enumerate(jobs[1:4])
    ]
    plan = decode_plan(0, 1, 2, num_nodes=choices.num_nodes, draft_depth=choices.depth)
    trees = runner.draft(plan)
    with torch.inference_mode():
        for request_id, (job, root) in enumerate(zip(jobs[1:4], roots, strict=True)):
            features = models.recompute(job.prompt_ids, root).features
            by_hand = HandGrowth(head, features, [*job.prompt_ids, root], job.sampling, text_attention)
            drafted: dict[tuple[int, ...], int] = {}
            for path in choices.paths:
                above = [drafted[path[:depth]] for depth in range(1, len(path))]
                drafted[path] = by_hand.candidates(above, path[-1] + 1)[-1][0]
            assert trees[request_id][0] == [root, *drafted.values()]


def test_requests_drafted_together_equal_requests_alone(models: Models, jobs: list[Job]) -> None:
    """Catches hidden states or keys that leak between requests of different lengths in one batch."""
    together = DraftRunner(models.random_head, LAYOUT)
    alone = {}
    for request_id, job in enumerate(jobs[:4]):
        pages = list(range(request_id * 15, request_id * 15 + 15))
        start(together, models, request_id, job, pages, [len(job.prompt_ids)])
        single = DraftRunner(models.random_head, LAYOUT)
        start(single, models, request_id, job, pages, [len(job.prompt_ids)])
        alone |= single.draft(decode_plan(request_id))
    assert together.draft(decode_plan(0, 1, 2, 3)) == alone
    assert together.draft(decode_plan(3, 1)) == {request_id: alone[request_id] for request_id in (3, 1)}


def test_drafting_leaves_the_committed_rows_alone(models: Models, jobs: list[Job]) -> None:
    """Catches a draft that changes the next draft, or a row below the committed length."""
    runner = DraftRunner(models.random_head, LAYOUT)
    start(runner, models, 0, jobs[2], [9, 0, 7, 3, 5, 2], [7])
    slots = LAYOUT.slots_of([9, 0])[:7]
    before = [cache[slots].clone() for cache in runner.pool.caches]
    trees = runner.draft(decode_plan(0))
    assert runner.draft(decode_plan(0)) == trees
    for cache, committed in zip(runner.pool.caches, before, strict=True):
        assert torch.equal(cache[slots], committed)


def test_runs_of_forgotten_requests_are_skipped(models: Models, jobs: list[Job]) -> None:
    """Catches features taken by the wrong request when one in the middle of the batch was cancelled."""
    runner, expected = DraftRunner(models.random_head, LAYOUT), DraftRunner(models.random_head, LAYOUT)
    for request_id in range(3):
        pages = list(range(request_id * 15, request_id * 15 + 15))
        for drafter in (runner, expected):
            start(drafter, models, request_id, jobs[request_id], pages, [len(jobs[request_id].prompt_ids)])
    lengths = [len(job.prompt_ids) for job in jobs[:3]]
    runs = [AcceptedRun(request_id, lengths[request_id], 2, [4, 9]) for request_id in range(3)]
    features = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    expected.extend(runs, features)
    runner.update_requests(StepPlan(2, finished=[1]))
    assert runner.num_granted_pages == 30
    runner.extend(runs, features)
    assert runner.draft(decode_plan(0, 2)) == expected.draft(decode_plan(0, 2))
    runner.update_requests(StepPlan(3, finished=[0, 2]))
    runner.extend(runs, features)
    assert runner.num_granted_pages == 0


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(2, decode=[DecodeItem(0, 1)], draft_depth=3, width=2),
        StepPlan(2, decode=[DecodeItem(0, 4)], draft_depth=0, width=2),
        StepPlan(2, prefill=[PrefillChunk(0, 1)], draft_depth=3, width=2),
        StepPlan(2),
    ],
    ids=["one node", "no levels", "prefill only", "nothing"],
)
def test_nothing_to_draft(plan: StepPlan, models: Models, jobs: list[Job]) -> None:
    """Catches plain decoding that costs a draft, or fails for want of one."""
    runner = DraftRunner(models.random_head, LAYOUT)
    start(runner, models, 0, jobs[0], [0, 1, 2, 3], [len(jobs[0].prompt_ids)])
    assert runner.draft(plan) == {}


def test_budgets_of_a_batch_differ(models: Models, jobs: list[Job]) -> None:
    """Catches the smallest or largest budget being spent on every request, and a root-only request in between."""
    runner = DraftRunner(models.random_head, LAYOUT)
    for request_id in range(4):
        pages = list(range(request_id * 15, request_id * 15 + 15))
        start(runner, models, request_id, jobs[request_id], pages, [len(jobs[request_id].prompt_ids)])
    items = [DecodeItem(0, 5), DecodeItem(1, 1), DecodeItem(2, 2), DecodeItem(3, 16)]
    trees = runner.draft(StepPlan(2, decode=items, draft_depth=3, width=3))
    assert {request_id: len(tokens) for request_id, (tokens, _) in trees.items()} == {0: 5, 2: 2, 3: 16}


def test_width_is_bounded_by_the_draft_vocabulary(models: Models, jobs: list[Job]) -> None:
    """Catches a plan wider than a tiny draft vocabulary taking the drafter down."""
    runner = DraftRunner(models.random_head, LAYOUT)
    start(runner, models, 0, jobs[0], list(range(60)), [len(jobs[0].prompt_ids)])
    tokens, parents = runner.draft(decode_plan(0, num_nodes=100, width=100, draft_depth=1))[0]
    assert len(tokens) == 1 + models.random_head.config.draft_vocab_size
    assert set(parents[1:]) == {0}


def test_drafting_before_the_prompt_is_through_is_an_error(models: Models, jobs: list[Job]) -> None:
    """Catches a tree grown from a state that does not exist."""
    runner = DraftRunner(models.random_head, LAYOUT)
    start(runner, models, 0, jobs[3], list(range(12)), [3])
    with pytest.raises(RuntimeError, match="before its prompt is through"):
        runner.draft(decode_plan(0))


def test_a_shape_wider_than_the_vocabulary_is_refused(models: Models) -> None:
    """Catches a fixed tree that fails at the first step, on a head with a small vocabulary."""
    with pytest.raises(ValueError, match="tree: the shape asks for 56 candidates .* only 55"):
        DraftRunner(models.random_head, PoolLayout(4, 16), choices=TreeChoices.cartesian([56]))
