"""Growth of draft trees: the operations of `kernels.grow` against those of `kernels.triton_grow`.

Every growth is compared level by level, scores by equality: both sides add the same two float32 numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.kernels.selection import SelectedTrees, select_within
from eyas.kernels.triton_grow import OPERATIONS

EASY = [-step / 7 for step in range(1, 60)]


def random_levels(batch: int, width: int, depth: int, values: list[float] | None = None) -> list[Tensor]:
    """Log-probabilities of every level, `[B, W]` and then `[B, W, W]`, drawn from `values`."""
    rng = random.Random(batch * 100 + width * 10 + depth)
    first = [sorted(rng.choices(values or EASY, k=width), key=lambda value: -value) for _ in range(batch)]
    levels = [torch.tensor(first, device=DEVICE)]
    for _ in range(depth - 1):
        edges = torch.tensor(rng.choices(values or EASY, k=batch * width * width), device=DEVICE)
        levels.append(edges.view(batch, width, width))
    return levels


def compare(levels: list[Tensor], budgets: list[int], max_nodes: int) -> SelectedTrees:
    """Grow with both; tokens number the candidates in pool order."""
    batch, width = levels[0].shape
    expected, growth = TreeGrowth(width), TreeGrowth(width, OPERATIONS)
    first = 1
    for level, edges in enumerate(levels):
        num_candidates = edges.shape[1:].numel()
        tokens = torch.arange(first, first + num_candidates, device=DEVICE).view(edges.shape[1:]).expand(edges.shape)
        first += num_candidates
        frontiers = [
            each.start(tokens, edges) if level == 0 else each.expand(tokens, edges) for each in (expected, growth)
        ]
        for field in ("tokens", "scores", "parent_ranks", "pool_indices"):
            ours, theirs = (getattr(frontier, field) for frontier in frontiers)
            assert torch.equal(ours, theirs), field
    roots = torch.arange(7, 7 + batch, device=DEVICE)
    num_nodes = torch.tensor(budgets, dtype=torch.int64, device=DEVICE)
    selected = growth.finish(roots, num_nodes, max_nodes)
    assert_same(selected, expected.finish(roots, num_nodes, max_nodes))
    assert bool(selected.is_closed.all())
    return selected


def assert_same(selected: SelectedTrees, expected: SelectedTrees) -> None:
    assert torch.equal(selected.trees.tokens, expected.trees.tokens)
    assert torch.equal(selected.trees.parents, expected.trees.parents)
    assert torch.equal(selected.trees.num_nodes, expected.trees.num_nodes)
    assert torch.equal(selected.is_closed, expected.is_closed)


def easy() -> None:
    """Catches a wrong survivor, parent or choice where nothing ties."""
    compare(random_levels(3, 4, 4), [9, 30, 14], max_nodes=30)


def ties() -> None:
    """Catches an order among equal scores that is not the pool's: a node would be kept without its parent."""
    for value in (0.0, -1.0):
        compare(random_levels(2, 4, 4, [value]), [6, 23], max_nodes=32)
    compare(random_levels(2, 10, 3, [0.0, -1.0]), [17, 64], max_nodes=64)


def certain_edges() -> None:
    """Catches a probability-one descendant chosen before the ancestor it ties with, also with -0.0 and above 0."""
    compare(random_levels(3, 3, 5, [0.0, -0.0, 0.5, math.inf, -1.0]), [4, 9, 20], max_nodes=20)


def underflow() -> None:
    """Catches sums that pass below float32, or are lost in it, and so tie a child with its parent."""
    with np.errstate(over="ignore"):  # the interpreter's NumPy warns of what is meant here
        for values in ([-1e30, -1e-8], [-3e38, -math.inf], [-1e-45, 0.0], [-math.inf]):
            compare(random_levels(2, 4, 4, values), [7, 30], max_nodes=40)


def nan_logits() -> None:
    """Catches NaN that outranks a candidate, or spreads to its siblings."""
    compare(random_levels(3, 4, 3, [math.nan, -0.5, -2.0]), [5, 12, 37], max_nodes=40)
    compare(random_levels(2, 3, 3, [math.nan]), [5, 22], max_nodes=22)


def width_one() -> None:
    """Catches a chain that branches or loses its order."""
    compare(random_levels(2, 1, 6), [4, 9], max_nodes=9)


def depth_one() -> None:
    """Catches a selection that needs a second level."""
    compare(random_levels(2, 5, 1), [3, 6], max_nodes=6)


def one_node() -> None:
    """Catches a root that is not counted in the budget."""
    compare(random_levels(2, 3, 2), [1, 1], max_nodes=1)
    compare(random_levels(2, 3, 2), [1, 5], max_nodes=8)


def ragged_with_padding_requests() -> None:
    """Catches one request's budget in another's tree, and a padding request that gets a node."""
    levels = random_levels(6, 4, 3)
    levels[1][2], levels[2][4] = math.nan, math.nan  # what padding requests are computed from means nothing
    selected = compare(levels, [5, 1, 0, 100, -3, 17], max_nodes=24)
    assert selected.trees.num_nodes.tolist() == [5, 1, 0, 24, 0, 17]


def whole_pool() -> None:
    """Catches nodes invented past the last candidate, and trees not padded to the width asked for."""
    selected = compare(random_levels(2, 3, 3), [22, 500], max_nodes=30)
    assert selected.trees.num_nodes.tolist() == [22, 22]


def nodes_64_and_more() -> None:
    """Catches node numbers that wrap."""
    compare(random_levels(3, 10, 4), [64, 65, 200], max_nodes=200)


def pool_of_1552() -> None:
    """Catches a pool that outgrows a program's registers, or a width beyond the usual."""
    compare(random_levels(2, 16, 7), [64, 128], max_nodes=128)


def half_precisions() -> None:
    """Catches scores summed in the head's own precision, where close candidates tie."""
    for dtype in (torch.bfloat16, torch.float16):
        compare([level.to(dtype) for level in random_levels(2, 4, 4)], [9, 30], max_nodes=30)


def candidates_shared_by_parents() -> None:
    """Catches strides taken for granted: a head whose levels do not depend on each other hands in views."""
    first, *levels = random_levels(2, 4, 3)
    shared = [level[:, :1].expand(-1, 4, -1) for level in levels]
    compare([first, *shared, levels[0].transpose(1, 2)], [9, 30], max_nodes=30)


def empty_batch() -> None:
    """Catches a launch of no programs, which CUDA refuses."""
    compare([torch.empty(0, 3, device=DEVICE), torch.empty(0, 3, 3, device=DEVICE)], [], max_nodes=8)


def select(parents: list[list[int]], scores: list[list[float]], budgets: list[int], max_nodes: int) -> SelectedTrees:
    """Select with both from pools whose tokens number the candidates."""
    pool = torch.tensor(parents, device=DEVICE)
    arguments = (
        torch.full((len(budgets),), 50, device=DEVICE),
        torch.arange(1, pool.shape[1] + 1, device=DEVICE).repeat(len(budgets), 1),
        pool,
        torch.tensor(scores, device=DEVICE),
        torch.tensor(budgets, device=DEVICE),
        max_nodes,
    )
    selected = OPERATIONS.select_within(*arguments)
    assert_same(selected, select_within(*arguments))
    return selected


def missing_parents() -> None:
    """Catches a node whose parent is absent, itself, later or no index at all being hung from the root."""
    parents = [[0, 0, 1], [0, 2, 1], [0, 3, 1], [0, 4, 1], [0, 2**40, 1], [0, -2, 1], [0, 1, 2]]
    scores = [[-9.0, -1.0, -2.0]] + [[-1.0, -2.0, -3.0]] * 6
    selected = select(parents, scores, [3] * 7, max_nodes=5)
    assert selected.is_closed.tolist() == [False] * 6 + [True]
    assert selected.trees.num_nodes.tolist() == [1] * 6 + [3]


def missing_parents_beyond_the_budget() -> None:
    """Catches a fault reported of candidates that nobody keeps, or of a padding request."""
    selected = select([[0, 0, 9]] * 3, [[-1.0, -2.0, -3.0]] * 3, [3, 0, 4], max_nodes=4)
    assert selected.is_closed.tolist() == [True, True, False]


def ties_about_the_budget() -> None:
    """Catches the last place given to a later one of several equals, where better ones stand among them."""
    scores = [[-1.0, -2.0, -2.0, -1.0, -2.0, -0.0, 0.0, -2.0], [3.0, -3.0, 3.0, math.nan, -math.inf, 7.0, 3.0, 0.0]]
    for budget in range(1, 10):
        select([[0] * 8] * 2, scores, [budget, 10 - budget], max_nodes=9)


REGIMES: list[Callable[[], object]] = [
    easy,
    ties,
    certain_edges,
    underflow,
    nan_logits,
    width_one,
    depth_one,
    one_node,
    ragged_with_padding_requests,
    whole_pool,
    nodes_64_and_more,
    pool_of_1552,
    half_precisions,
    candidates_shared_by_parents,
    empty_batch,
    missing_parents,
    missing_parents_beyond_the_budget,
    ties_about_the_budget,
]
CASES = [ParityCase("grow", "triton", regime.__name__, regime) for regime in REGIMES]
