"""What is observed of verify steps, by hand-made growths and by real workers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.deployments.offline import OfflineEngine, OfflineOutput, OfflineRequest, StepTimes, seeded_requests
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import TreeShape
from eyas.deployments.step_observer import Edge, ObservedStep, ObservedWorkers, RecordedGrowth, edges_of_trees
from eyas.kernels.grow import Frontier, TreeGrowth
from eyas.kernels.noise import gumbel_noise, stream_key
from eyas.kernels.static_tree import StaticGrowth, TreeChoices
from eyas.models.acceptance_prior import AcceptancePrior
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers

if TYPE_CHECKING:
    from tests.deployments.conftest import Following

Tree = tuple[list[int], list[int]]
PROMPTS = [[1, 2, 3], [60, 61], [7, 8, 9, 10, 11, 12, 13, 14]]
SEED = 3
LAYOUT = PoolLayout(num_pages=64, page_size=8)


def offers(seed: int, path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
    """Candidates after a path: few tokens and fewer probabilities, so that both occur again and again."""
    source = random.Random(f"{seed} {path}")
    tokens = source.sample(range(6), width)
    return [(token, source.choice([0.5, 0.25])) for token in tokens]


def grow(growth: RecordedGrowth, seeds: list[int], depth: int) -> None:
    """As drafting does it, every request with offers of its own; growth takes the roots of their probabilities."""
    paths: list[list[tuple[int, ...]]] = [[()] for _ in seeds]
    for level in range(1, depth + 1):
        width = growth.num_candidates(level)
        rows = [[offers(seed, path, width) for path in row] for seed, row in zip(seeds, paths, strict=True)]
        tokens = torch.tensor([[[token for token, _ in each] for each in row] for row in rows])
        log_probs = torch.tensor([[[math.log(x) for _, x in each] for each in row] for row in rows])
        growth.raw.append(log_probs)
        scores = log_probs / 2
        frontier: Frontier
        frontier = growth.start(tokens[:, 0], scores[:, 0]) if level == 1 else growth.expand(tokens, scores)
        ranks, chosen = frontier.parent_ranks.tolist(), frontier.tokens.tolist()
        paths = [
            [(*row[rank], token) for rank, token in zip(ranks[index], chosen[index], strict=True)]
            for index, row in enumerate(paths)
        ]


def check_edges(edges: list[Edge], tree: Tree, seed: int, widths: list[int]) -> None:
    paths: list[tuple[int, ...]] = [()]
    for token, parent, edge in zip(tree[0][1:], tree[1][1:], edges, strict=True):
        above = paths[parent]
        offered = offers(seed, above, widths[len(above)])
        place = [known for known, _ in offered].index(token)
        assert edge.rank == place + 1
        assert (edge.raw, edge.used) == pytest.approx((offered[place][1], offered[place][1] ** 0.5))
        paths.append((*above, token))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_node_finds_its_own_candidate(seeds: list[int], width: int, depth: int, data: st.DataObject) -> None:
    """Catches nodes told apart by token or score, both of which are often alike, and rows of a batch mixed up."""
    growth = TreeGrowth(width)
    recorded = RecordedGrowth(growth)
    grow(recorded, seeds, depth)
    most = 1 + width + (depth - 1) * width**2
    budgets = torch.tensor([data.draw(st.integers(1, most)) for _ in seeds])
    trees = growth.finish(torch.zeros(len(seeds), dtype=torch.int64), budgets)
    rows: list[Tree] = [
        (trees.tokens[row, :count].tolist(), trees.parents[row, :count].tolist())
        for row, count in enumerate(trees.num_nodes.tolist())
    ]
    for edges, tree, seed in zip(edges_of_trees(recorded, rows), rows, seeds, strict=True):
        check_edges(edges, tree, seed, [width] * depth)


def test_fixed_shapes_are_observed_as_well() -> None:
    """Catches a level whose extended nodes are not its first ones."""
    growth = StaticGrowth(TreeChoices.of([(0,), (1,), (2,), (1, 0), (1, 1), (2, 0), (2, 0, 0)]))
    recorded = RecordedGrowth(growth)
    grow(recorded, [5], 3)
    trees = growth.finish(torch.zeros(1, dtype=torch.int64), torch.tensor([8]))
    tree = (trees.tokens[0].tolist(), trees.parents[0].tolist())
    (edges,) = edges_of_trees(recorded, [tree])
    assert [edge.rank for edge in edges] == [1, 2, 3, 1, 2, 1, 1]
    check_edges(edges, tree, 5, [3, 2, 1])


def test_impossible_candidates_have_probability_0() -> None:
    """Catches a head's NaN or a score above 0 ending an evaluation, though the engine can do with them."""
    growth = TreeGrowth(3)
    recorded = RecordedGrowth(growth)
    log_probs = torch.tensor([[math.nan, 1e-3, -math.inf]])
    recorded.raw.append(log_probs[:, None])
    recorded.start(torch.tensor([[1, 2, 3]]), log_probs)
    (edges,) = edges_of_trees(recorded, [([0, 1, 2, 3], [-1, 0, 0, 0])])
    assert edges == [Edge(1, 0.0, 0.0), Edge(2, 1.0, 1.0), Edge(3, 0.0, 0.0)]


def test_levels_may_be_alike_under_every_node() -> None:
    """Catches a head whose levels do not depend on each other: its own scores of a level come once for all nodes."""
    recorded = RecordedGrowth(TreeGrowth(2))
    recorded.raw += [torch.tensor([[[0.5, 0.25]]]).log(), torch.tensor([[[0.75, 0.125]]]).log()]
    recorded.start(torch.tensor([[1, 2]]), torch.tensor([[0.4, 0.3]]).log())
    recorded.expand(torch.tensor([[[3, 4], [3, 4]]]), torch.tensor([[[0.9, 0.1], [0.9, 0.1]]]).log())
    (edges,) = edges_of_trees(recorded, [([0, 1, 2, 3, 4, 3], [-1, 0, 0, 1, 1, 2])])
    assert [edge.rank for edge in edges] == [1, 2, 1, 2, 1]
    assert [edge.raw for edge in edges] == pytest.approx([0.5, 0.25, 0.75, 0.125, 0.75])
    assert [edge.used for edge in edges] == pytest.approx([0.4, 0.3, 0.9, 0.1, 0.9])


def generate(
    workers: LocalWorkers | ObservedWorkers, temperature: float, shape: TreeShape, max_tokens: list[int]
) -> tuple[list[OfflineOutput], StepTimes]:
    engine = OfflineEngine(workers, PageAllocator(LAYOUT.num_pages, LAYOUT.page_size), shape, 2, max_prefill_tokens=7)
    requests = seeded_requests(PROMPTS, temperature, SEED, 1, frozenset())
    outputs = engine.generate(
        [
            OfflineRequest(each.prompt_ids, each.sampling, count)
            for each, count in zip(requests, max_tokens, strict=True)
        ]
    )
    return outputs, engine.times


def emitted(steps: list[ObservedStep]) -> list[int]:
    return [token for step in steps for token in step.run]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [TreeShape(8, 3, 3), TreeShape(4, 3, 1)])
def test_real_steps_are_observed(following: Following, temperature: float, shape: TreeShape) -> None:
    """Catches observation that changes a text, and trees or runs that go to another request or step."""
    expected, _ = generate(following.workers(LAYOUT), temperature, shape, [20, 1, 9])
    observed = ObservedWorkers(following.workers(LAYOUT))
    outputs, times = generate(observed, temperature, shape, [20, 1, 9])
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert 1 not in observed.steps  # its only token came from the prompt's pass
    assert sum(output.num_step_tokens for output in outputs) > sum(output.num_steps for output in outputs)
    for output in (outputs[0], outputs[2]):
        steps = observed.steps[output.request_id]
        assert len(steps) == output.num_steps
        assert emitted(steps)[: output.num_step_tokens] == output.token_ids[1:]
        roots = [output.token_ids[0], *(step.run[-1] for step in steps)]
        for step, root in zip(steps, roots, strict=False):
            assert step.tokens[0] == root
            assert len(step.tokens) == shape.node_budget
    assert len(observed.draft_ms) == len(observed.verify_ms) == times.num_steps
    assert (sum(observed.draft_ms), sum(observed.verify_ms)) == pytest.approx((times.draft_ms, times.verify_ms))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("has_prior", [False, True])
def test_probabilities_are_the_heads_own(
    following: Following, new_prior: Callable[..., AcceptancePrior], monkeypatch: pytest.MonkeyPatch,
    temperature: float, has_prior: bool,
) -> None:  # fmt: skip
    """Catches cumulative scores, edges of another request or node, ranks that start at 0, and scores of the prior taken
    for the head's."""
    prior = new_prior() if has_prior else None
    monkeypatch.setattr(following.head, "acceptance_prior", prior)
    observed = ObservedWorkers(following.workers(LAYOUT))
    assert observed.has_prior == has_prior
    generate(observed, temperature, TreeShape(9, 3, 3), [12, 5, 12])
    num_edges = 0
    for request_id, prompt in enumerate(PROMPTS):
        position = len(prompt)  # of the root
        for step in observed.steps[request_id]:
            depths = [0]
            for child, edge in enumerate(step.edges, start=1):
                depth = depths[step.parents[child]] + 1
                depths.append(depth)
                row = following.head.logits[step.tokens[step.parents[child]]]
                if temperature > 0:
                    key = stream_key(SEED + request_id, position + depth)
                    row = row / temperature + gumbel_noise([key], following.head.candidate_ids)[0]
                best = row.log_softmax(-1).topk(3)
                scores = best.values
                if prior is not None:
                    scores = prior.apply(scores[None, None], depth, torch.tensor([temperature > 0]))[0, 0]
                place = best.indices.tolist().index(step.tokens[child])
                assert edge.rank == place + 1
                assert edge.raw == pytest.approx(math.exp(best.values[place]), rel=1e-4)
                assert edge.used == pytest.approx(math.exp(scores[place]), rel=1e-4)
                num_edges += 1
            position += len(step.run)
    assert num_edges > 50


def test_workers_without_a_head_are_refused(following: Following) -> None:
    """Catches an evaluation of nothing."""
    with pytest.raises(ValueError, match="nothing to observe without a draft head"):
        ObservedWorkers(LocalWorkers(following.workers(LAYOUT).target, None))


def test_a_step_must_be_a_tree() -> None:
    """Catches edges shifted by one against their nodes."""
    with pytest.raises(ValueError, match="2 tokens, 2 parents and 2 edges are no tree"):
        ObservedStep([1, 2], [-1, 0], [Edge(1, 0.5, 0.5), Edge(2, 0.5, 0.5)], [3])
