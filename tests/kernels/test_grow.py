"""Candidates carry tokens 1, 2, 3, ... in pool order, so a token of a grown tree names its candidate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import DEVICE
from parity_grow import compare
from torch import Tensor

from eyas.kernels.grow import Frontier, GrownLevel, GrowOperations, TreeGrowth, expand_level
from eyas.kernels.selection import SelectedTrees, select_nodes, select_within
from eyas.kernels.tree import DraftTrees

EASY_LOG_PROBS = [-step / 7 for step in range(1, 60)]
HARD_LOG_PROBS = [0.0, -0.0, -math.inf, -1e30, -3e38, -1e-45, -1e-8, math.nan, math.inf, 0.5, -0.5, -1.0]


def edge_score(log_prob: float) -> float:
    return -math.inf if math.isnan(log_prob) else min(log_prob, 0.0)


@st.composite
def growths(draw: st.DrawFn) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities per level, `[B, W]` then `[B, W, W]` each, and budgets `[B]`, some above the pool."""
    batch, width, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ties = [[0.0], [0.0, -1.0], [-1e30], [-math.inf, -3e38], [math.nan]]
    values = draw(st.sampled_from([EASY_LOG_PROBS, HARD_LOG_PROBS, *ties]))
    rng = draw(st.randoms(use_true_random=False))
    first_level = [sorted(rng.choices(values, k=width), key=edge_score, reverse=True) for _ in range(batch)]
    log_probs = [torch.tensor(first_level)]  # `start` takes the root's children best first
    for _ in range(depth - 1):
        log_probs.append(torch.tensor(rng.choices(values, k=batch * width * width)).reshape(batch, width, width))
    pooled = width + (depth - 1) * width * width
    budgets = draw(st.lists(st.integers(1, pooled + 3), min_size=batch, max_size=batch))
    return log_probs, torch.tensor(budgets)


def pooled(log_probs: list[Tensor], growth: TreeGrowth) -> TreeGrowth:
    """Feed every level to `growth`."""
    first = 1
    for level, edges in enumerate(log_probs):
        tokens = torch.arange(first, first + edges[0].numel(), device=edges.device)
        extend = growth.start if level == 0 else growth.expand
        extend(tokens.reshape(edges.shape[1:]).expand(edges.shape), edges)
        first += edges[0].numel()
    return growth


def grow(log_probs: list[Tensor], num_nodes: Tensor) -> DraftTrees:
    growth = pooled(log_probs, TreeGrowth(width=log_probs[0].shape[1]))
    return growth.finish(torch.zeros(len(num_nodes), dtype=torch.int64), num_nodes)


def edges_of(trees: DraftTrees, row: int) -> list[tuple[int, int]]:
    """`(parent's token, token)` of every node below the root."""
    tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
    return [(tokens[parents[node]], tokens[node]) for node in range(1, int(trees.num_nodes[row]))]


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def grow_by_hand(log_probs: list[Tensor], row: int, num_nodes: int) -> list[tuple[int, int]]:
    """EAGLE-2 for one request on Python lists: the kept `(parent's token, token)`, in pool order."""
    width = log_probs[0].shape[1]
    pool: list[tuple[float, int, int]] = []  # score, parent's token, token
    survivors = [(0.0, 0, 0)]
    for edges in log_probs:
        level = []
        for place, log_prob in enumerate(edges[row].flatten().tolist()):
            score, _, parent = survivors[place // width]
            level.append((float32(score + edge_score(log_prob)), parent, len(pool) + len(level) + 1))
        pool += level
        survivors = sorted(level, key=lambda candidate: -candidate[0])[:width]
    best = sorted(pool, key=lambda candidate: -candidate[0])[: num_nodes - 1]
    return sorted(((parent, token) for _, parent, token in best), key=lambda edge: edge[1])


@given(growth=growths())
def test_grows_the_tree_of_the_definition(growth: tuple[list[Tensor], Tensor]) -> None:
    """Catches any wrong survivor, parent or choice under ties, certain, impossible, underflowing and NaN edges."""
    log_probs, num_nodes = growth
    trees = grow(log_probs, num_nodes)
    trees.validate()
    for row, budget in enumerate(num_nodes.tolist()):
        assert edges_of(trees, row) == grow_by_hand(log_probs, row, budget)


@given(growth=growths(), dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
def test_every_precision_is_summed_in_float32(growth: tuple[list[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Catches scores summed in the head's own precision, where close candidates tie."""
    log_probs, num_nodes = growth
    edges = [level.to(dtype) for level in log_probs]
    trees = grow(edges, num_nodes)
    assert torch.equal(trees.tokens, grow([level.float() for level in edges], num_nodes).tokens)


@given(growth=growths())
def test_budget_beyond_the_pool_yields_the_pool(growth: tuple[list[Tensor], Tensor]) -> None:
    """Catches nodes invented, or counted, past the last candidate."""
    log_probs, num_nodes = growth
    pooled = sum(edges[0].numel() for edges in log_probs)
    trees = grow(log_probs, num_nodes + pooled)
    trees.validate()
    assert trees.num_nodes.tolist() == [pooled + 1] * len(num_nodes)
    assert torch.equal(trees.tokens, torch.arange(pooled + 1).expand_as(trees.tokens))


@given(growth=growths())
def test_ragged_batch_equals_single_rows(growth: tuple[list[Tensor], Tensor]) -> None:
    """Catches one request's budget or scores leaking into another's tree, and tokens left in the padding."""
    log_probs, num_nodes = growth
    trees = grow(log_probs, num_nodes)
    for row in range(trees.batch_size):
        alone = grow([edges[row : row + 1] for edges in log_probs], num_nodes[row : row + 1])
        padding = trees.max_nodes - alone.max_nodes
        assert trees.tokens[row].tolist() == alone.tokens[0].tolist() + [0] * padding
        assert trees.parents[row].tolist() == alone.parents[0].tolist() + [-2] * padding


@pytest.mark.parametrize("log_prob", [0.0, -1.0, -1e30, -math.inf, math.nan])
def test_wide_ties_keep_pool_order(log_prob: float) -> None:
    """Catches an unstable sort, which small pools do not show."""
    log_probs = [torch.zeros(2, 10), *(torch.full((2, 10, 10), log_prob) for _ in range(5))]
    trees = grow(log_probs, torch.tensor([60, 331]))
    trees.validate()
    assert edges_of(trees, 0) == grow_by_hand(log_probs, 0, 60)
    assert edges_of(trees, 1) == grow_by_hand(log_probs, 1, 331)


def test_certain_chain_outranks_its_siblings() -> None:
    """Catches a probability-one descendant chosen before, or instead of, the ancestor it ties with."""
    log_probs = [torch.tensor([[0.0, -0.1]]), *(torch.tensor([[[0.0, -0.1], [0.0, -0.1]]]) for _ in range(3))]
    trees = grow(log_probs, torch.tensor([5]))
    assert trees.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert trees.tokens.tolist() == [[0, 1, 3, 7, 11]]


def test_nan_never_outranks_a_candidate() -> None:
    """Catches NaN sorting first, as it does in a descending torch sort."""
    trees = grow([torch.tensor([[-5.0, math.nan, -1e30]])], torch.tensor([3]))
    assert trees.tokens.tolist() == [[0, 1, 3]]


def test_width_one_is_a_chain() -> None:
    """Catches a width-1 tree that branches or loses its order."""
    trees = grow([torch.tensor([[-1.0]]), torch.tensor([[[-0.5]]]), torch.tensor([[[-2.0]]])], torch.tensor([9]))
    assert trees.parents.tolist() == [[-1, 0, 1, 2]]
    assert trees.tokens.tolist() == [[0, 1, 2, 3]]


def test_depth_one_is_a_star() -> None:
    """Catches a growth that needs a second level to finish."""
    trees = grow([torch.tensor([[-1.0, -2.0, -3.0]])], torch.tensor([3]))
    assert trees.parents.tolist() == [[-1, 0, 0]]
    assert trees.tokens.tolist() == [[0, 1, 2]]


def test_budget_of_one_is_the_root() -> None:
    """Catches a root that is not counted in the budget, alone and beside a larger request."""
    log_probs = [torch.zeros(2, 2), torch.zeros(2, 2, 2)]
    assert grow(log_probs, torch.tensor([1, 1])).parents.tolist() == [[-1], [-1]]
    trees = grow(log_probs, torch.tensor([1, 3]))
    trees.validate()
    assert trees.parents.tolist() == [[-1, -2, -2], [-1, 0, 0]]


@given(growth=growths())
def test_frontier_names_its_parents(growth: tuple[list[Tensor], Tensor]) -> None:
    """Catches survivors paired with another survivor's path, which feeds the head the wrong hidden states."""
    log_probs, num_nodes = growth
    batch, width = log_probs[0].shape
    candidates = TreeGrowth(width)
    frontier = candidates.start(torch.arange(1, width + 1).expand(batch, width), log_probs[0])
    assert torch.equal(frontier.tokens, frontier.pool_indices)
    first = width + 1
    for edges in log_probs[1:]:
        tokens = torch.arange(first, first + width * width).reshape(width, width).expand(edges.shape)
        previous = frontier
        frontier = candidates.expand(tokens, edges)
        assert torch.equal(frontier.tokens, frontier.pool_indices)
        assert torch.equal(frontier.parent_ranks, (frontier.tokens - first) // width)
        assert bool((frontier.scores <= previous.scores.gather(1, frontier.parent_ranks)).all())
        first += width * width


def select(parents: list[int], scores: list[float], num_nodes: list[int]) -> DraftTrees:
    """Select from one pool for requests that differ in their budgets only."""
    rows = len(num_nodes)
    return select_nodes(
        root_tokens=torch.zeros(rows, dtype=torch.int64),
        tokens=torch.arange(1, len(parents) + 1).repeat(rows, 1),
        parents=torch.tensor(parents).repeat(rows, 1),
        scores=torch.tensor(scores).repeat(rows, 1),
        num_nodes=torch.tensor(num_nodes),
    )


@pytest.mark.parametrize(
    ("parents", "scores"),
    [
        ([0, 0, 1], [-9.0, -1.0, -2.0]),
        ([0, 2, 1], [-1.0, -2.0, -3.0]),
        ([0, 3, 1], [-1.0, -2.0, -3.0]),
        ([0, 4, 1], [-1.0, -2.0, -3.0]),
        ([0, 99, 1], [-1.0, -2.0, -3.0]),
        ([0, -2, 1], [-1.0, -2.0, -3.0]),
    ],
    ids=["not kept", "itself", "later", "just past the pool", "far past the pool", "negative"],
)
@pytest.mark.parametrize("num_nodes", [[3], [3, 4], [1, 3]])
def test_missing_parent_is_an_error(parents: list[int], scores: list[float], num_nodes: list[int]) -> None:
    """Catches a node whose parent is absent being hung from the root, from padding or from itself."""
    with pytest.raises(ValueError, match="parent was not kept"):
        select(parents, scores, num_nodes)


def test_parents_are_renumbered() -> None:
    """Catches pool indices left in a tree from which candidates were dropped."""
    trees = select([0, 0, 2, 3], [-9.0, -1.0, -2.0, -3.0], [4])
    assert trees.parents.tolist() == [[-1, 0, 1, 2]]
    assert trees.tokens.tolist() == [[0, 2, 3, 4]]


def test_refusals() -> None:
    """Catches an empty tree, an empty level and misshapen candidates."""
    with pytest.raises(ValueError, match="node budget must be at least 1"):
        select([0], [0.0], [2, 0])
    with pytest.raises(ValueError, match="width must be at least 1"):
        TreeGrowth(width=0)
    with pytest.raises(ValueError, match="max_nodes must be at least 1"):
        grow_within([torch.zeros(1, 2)], torch.tensor([2]), max_nodes=0)
    growth = TreeGrowth(width=2)
    with pytest.raises(ValueError, match=r"candidates must be \[1, 2\], got tokens \[1, 3\]"):
        growth.start(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3))
    growth.start(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"candidates must be \[1, 2, 2\]"):
        growth.expand(torch.zeros(1, 2, 2, dtype=torch.int64), torch.zeros(1, 2, 3))


def grow_within(log_probs: list[Tensor], num_nodes: Tensor, max_nodes: int) -> SelectedTrees:
    growth = pooled(log_probs, TreeGrowth(width=log_probs[0].shape[1]))
    return growth.finish(torch.full_like(num_nodes, 999), num_nodes, max_nodes)


@given(growth=growths(), max_nodes=st.integers(1, 60), data=st.data())
def test_fixed_width_holds_the_same_trees(
    growth: tuple[list[Tensor], Tensor], max_nodes: int, data: st.DataObject
) -> None:
    """Catches trees that depend on the width they are padded to, and padding requests that are not empty."""
    log_probs, num_nodes = growth
    is_padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(num_nodes), max_size=len(num_nodes))))
    selected = grow_within(log_probs, torch.where(is_padding, 1 - num_nodes, num_nodes), max_nodes)
    assert selected.is_closed.all()
    assert selected.trees.tokens.shape == selected.trees.parents.shape == (len(num_nodes), max_nodes)
    expected = grow(log_probs, num_nodes.clamp(max=max_nodes))
    for row in range(len(num_nodes)):
        count = 0 if is_padding[row] else int(expected.num_nodes[row])
        padding = max_nodes - count
        tokens, parents = expected.tokens[row].tolist()[:count], expected.parents[row].tolist()[:count]
        assert selected.trees.tokens[row].tolist() == [*[999][:count], *tokens[1:]] + [0] * padding
        assert selected.trees.parents[row].tolist() == parents + [-2] * padding
        assert int(selected.trees.num_nodes[row]) == count


@pytest.mark.parametrize("parent", [1, 3, 4, 99, -2], ids=["not kept", "itself", "later", "far past the pool", "none"])
def test_missing_parent_cuts_a_tree_to_its_root(parent: int) -> None:
    """Catches a node whose parent is absent being hung from the root, and its fault taken out on other requests."""
    selected = select_within(
        root_tokens=torch.tensor([8, 9]),
        tokens=torch.tensor([[1, 2, 3, 4]] * 2),
        parents=torch.tensor([[0, 0, parent, 1], [0, 0, 2, 2]]),
        scores=torch.tensor([[-9.0, -1.0, -2.0, -9.5]] * 2),
        num_nodes=torch.tensor([3, 3]),
        max_nodes=4,
    )
    assert selected.is_closed.tolist() == [False, True]
    assert selected.trees.tokens.tolist() == [[8, 0, 0, 0], [9, 2, 3, 0]]
    assert selected.trees.parents.tolist() == [[-1, -2, -2, -2], [-1, 0, 1, -2]]
    assert selected.trees.num_nodes.tolist() == [1, 3]


def test_nan_scores_rank_last() -> None:
    """Catches NaN sorting first, as it does in a descending torch sort, in a pool that did not come from growth."""
    assert select([0, 0, 0], [math.nan, -5.0, -math.inf], [3]).tokens.tolist() == [[0, 1, 2]]
    assert select([0, 0, 0], [math.nan, -5.0, -6.0], [3]).tokens.tolist() == [[0, 2, 3]]


def test_growth_at_a_fixed_width_reads_no_values() -> None:
    """Catches a look at a value on the host, which a captured graph cannot take: tensors without values suffice."""
    log_probs = [torch.empty(2, 4, device="meta"), *[torch.empty(2, 4, 4, device="meta")] * 3]
    selected = grow_within(log_probs, torch.empty(2, dtype=torch.int64, device="meta"), max_nodes=16)
    assert selected.trees.parents.shape == (2, 16)


def test_operations_are_those_given() -> None:
    """Catches a growth that falls back to other operations than the ones chosen for it."""
    calls: list[str] = []

    def expand(frontier: Frontier, tokens: Tensor, log_probs: Tensor, first_index: int) -> GrownLevel:
        calls.append(f"expand from {first_index}")
        return expand_level(frontier, tokens, log_probs, first_index)

    def within(*arguments: Tensor | int) -> SelectedTrees:
        calls.append(f"select within {arguments[-1]}")
        return select_within(*arguments)  # type: ignore[arg-type]

    log_probs = [torch.zeros(1, 2), *[torch.zeros(1, 2, 2)] * 2]
    growth = pooled(log_probs, TreeGrowth(2, GrowOperations(expand, within)))
    growth.finish(torch.tensor([0]), torch.tensor([4]))
    growth.finish(torch.tensor([0]), torch.tensor([4]), max_nodes=7)
    assert calls == ["expand from 3", "expand from 7", "select within 4", "select within 7"]


@settings(max_examples=40)
@given(growth=growths(), max_nodes=st.integers(1, 60))
def test_triton_grows_the_same_trees(growth: tuple[list[Tensor], Tensor], max_nodes: int) -> None:
    """Catches ties, NaN and underflow in company that the parity matrix does not list."""
    log_probs, num_nodes = growth
    with np.errstate(over="ignore"):  # the interpreter's NumPy warns of sums below float32
        compare([level.to(DEVICE) for level in log_probs], num_nodes.tolist(), max_nodes)
