"""Shapes of fixed trees, and growing them; a token of a grown tree names its rank path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.kernels.published_trees import named_tree
from eyas.kernels.static_tree import ShapeIndices, StaticGrowth, TreeChoices
from eyas.kernels.tree import DraftTrees

MAX_RANK, MAX_DEPTH = 4, 5

Path_ = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> TreeChoices:
    """A random closed set of rank paths, ranks with gaps, in any order."""
    paths: list[Path_] = []
    for _ in range(draw(st.integers(1, 14))):
        parents = [(), *(path for path in paths if len(path) < MAX_DEPTH)]
        path = (*draw(st.sampled_from(parents)), draw(st.integers(0, MAX_RANK - 1)))
        if path not in paths:
            paths.append(path)
    return TreeChoices.of(draw(st.permutations(paths)))


def token_of(path: Path_) -> int:
    """A number for every rank path, 0 for the root."""
    token = 0
    for rank in path:
        token = token * (MAX_RANK + 1) + rank + 1
    return token


def candidates_under(parents: list[Path_], width: int) -> Tensor:
    """Tokens of the best `width` candidates of every parent, `[1, E, W]`."""
    return torch.tensor([[[token_of((*path, rank)) for rank in range(width)] for path in parents]])


def grow(choices: TreeChoices, budgets: list[int]) -> DraftTrees:
    """Trees of one shape."""
    growth = grown(choices, len(budgets))
    return growth.finish(torch.zeros(len(budgets), dtype=torch.int64), torch.tensor(budgets))


def grown(choices: TreeChoices, rows: int) -> StaticGrowth:
    """All levels of a shape, checking on the way that the head is asked to extend exactly the nodes with children."""
    growth = StaticGrowth(choices)
    parents: list[Path_] = [()]
    for level in range(1, choices.depth + 1):
        tokens = candidates_under(parents, growth.num_candidates(level)).expand(rows, -1, -1)
        log_probs = -0.1 * torch.arange(1, tokens.shape[2] + 1).expand(tokens.shape)
        frontier = growth.start(tokens[:, 0], log_probs[:, 0]) if level == 1 else growth.expand(tokens, log_probs)
        nodes = [path for path in choices.paths if len(path) == level]
        expanded = [path for path in nodes if any(other[:-1] == path for other in choices.paths)]
        assert frontier.tokens.tolist() == [[token_of(path) for path in expanded]] * rows
        assert frontier.parent_ranks.tolist() == [[parents.index(path[:-1]) for path in expanded]] * rows
        assert frontier.pool_indices.tolist() == [[1 + choices.paths.index(path) for path in expanded]] * rows
        scores = torch.tensor([[-0.1 * sum(rank + 1 for rank in path) for path in expanded]] * rows)
        torch.testing.assert_close(frontier.scores, scores.view(rows, len(expanded)))
        parents = expanded
    assert not parents
    return growth


def token_paths(trees: DraftTrees, row: int) -> set[Path_]:
    """Tokens from the root's child down to every node."""
    tokens, parents, paths = trees.tokens[row].tolist(), trees.parents[row].tolist(), [()]
    for node in range(1, int(trees.num_nodes[row])):
        paths.append((*paths[parents[node]], tokens[node]))
    return set(paths[1:])


@given(choices=shapes(), data=st.data())
def test_grows_the_shape_cut_to_each_budget(choices: TreeChoices, data: st.DataObject) -> None:
    """Catches a node under another parent, a prefix that loses a parent, and one request's budget cutting another's."""
    budgets = data.draw(st.lists(st.integers(1, choices.num_nodes + 3), min_size=1, max_size=4))
    trees = grow(choices, budgets)
    trees.validate()
    assert trees.num_nodes.tolist() == [min(budget, choices.num_nodes) for budget in budgets]
    for row, budget in enumerate(budgets):
        kept = choices.paths[: budget - 1]
        expected = {tuple(token_of(path[:depth]) for depth in range(1, len(path) + 1)) for path in kept}
        assert token_paths(trees, row) == expected


@given(choices=shapes(), depth=st.integers(1, MAX_DEPTH + 1))
def test_truncation_keeps_the_upper_levels(choices: TreeChoices, depth: int) -> None:
    """Catches a cut shape that is not closed any more, as a head with fewer levels needs it."""
    cut = choices.truncated(depth)
    assert cut == TreeChoices.of(path for path in choices.paths if len(path) <= depth)
    assert cut.depth == min(depth, choices.depth)
    grow(cut, [cut.num_nodes]).validate()


@given(choices=shapes())
def test_counts_follow_from_the_paths(choices: TreeChoices) -> None:
    """Catches a head asked for fewer candidates than a rank needs, where gaps in the ranks hide it."""
    assert choices.num_nodes == len(choices.paths) + 1
    for level in range(1, choices.depth + 1):
        ranks = [path[-1] for path in choices.paths if len(path) == level]
        assert choices.num_candidates(level) == max(ranks) + 1
    parents = {path[:-1] for path in choices.paths if len(path) > 1}
    assert choices.num_expanded == len(parents)
    assert all(path[:-1] == () or path[:-1] in choices.paths for path in choices.paths)


@given(
    width=st.integers(1, MAX_RANK), depth=st.integers(1, 4), seed=st.integers(0, 2**16), num_nodes=st.integers(2, 30)
)
def test_equals_the_dynamic_tree_of_the_same_shape(width: int, depth: int, seed: int, num_nodes: int) -> None:
    """Catches fixed and dynamic trees reading one head's candidates differently."""
    generator = torch.Generator().manual_seed(seed)
    levels = [torch.randn(width, generator=generator).log_softmax(0).sort(descending=True).values for _ in range(depth)]
    tokens = [torch.randperm(97, generator=generator)[:width] for _ in range(depth)]
    dynamic = TreeGrowth(width)
    dynamic.start(tokens[0][None], levels[0][None])
    for level in range(1, depth):
        dynamic.expand(tokens[level].expand(1, width, width), levels[level].expand(1, width, width))
    grown = dynamic.finish(torch.zeros(1, dtype=torch.int64), torch.tensor([num_nodes]))
    paths = token_paths(grown, 0)
    choices = TreeChoices.of(
        tuple(tokens[level].tolist().index(token) for level, token in enumerate(path)) for path in paths
    )
    static = StaticGrowth(choices)
    frontier = static.start(tokens[0][None], levels[0][None])
    for level in range(1, choices.depth):
        shape = (1, frontier.tokens.shape[1], width)
        frontier = static.expand(tokens[level].expand(shape), levels[level].expand(shape))
    fixed = static.finish(torch.zeros(1, dtype=torch.int64), torch.tensor([num_nodes]))
    fixed.validate()
    assert token_paths(fixed, 0) == paths


@pytest.mark.parametrize(
    ("widths", "parents"),
    [
        ([1, 1, 1], [-1, 0, 1, 2]),
        ([3], [-1, 0, 0, 0]),
        ([1], [-1, 0]),
        ([2, 2], [-1, 0, 0, 1, 1, 2, 2]),
    ],
    ids=["width 1 is a chain", "depth 1 is a star", "one node", "square"],
)
def test_cartesian_products(widths: list[int], parents: list[int]) -> None:
    """Catches a width applied to the wrong level, and the degenerate shapes."""
    choices = TreeChoices.cartesian(widths)
    assert grow(choices, [choices.num_nodes]).parents.tolist() == [parents]


def test_budget_of_one_is_the_root() -> None:
    """Catches a root left out of the budget, alone and beside a larger request."""
    choices = TreeChoices.cartesian([2, 1])
    assert grow(choices, [1, 1]).parents.tolist() == [[-1], [-1]]
    assert grow(choices, [1, 3]).parents.tolist() == [[-1, -2, -2], [-1, 0, 0]]
    with pytest.raises(ValueError, match="node budget must be at least 1"):
        grow(choices, [3, 0])


@given(choices=shapes(), data=st.data())
def test_fixed_width_holds_the_same_trees(choices: TreeChoices, data: st.DataObject) -> None:
    """Catches trees that depend on the width they are padded to, and padding requests that are not empty."""
    budgets = data.draw(st.lists(st.integers(-1, choices.num_nodes + 3), min_size=1, max_size=4))
    max_nodes = data.draw(st.integers(1, choices.num_nodes + 3))
    selected = grown(choices, len(budgets)).finish(
        torch.full((len(budgets),), 999), torch.tensor(budgets), max_nodes=max_nodes
    )
    assert selected.is_closed.all()
    expected = grow(choices, [choices.num_nodes])
    for row, budget in enumerate(budgets):
        count = max(0, min(budget, max_nodes, choices.num_nodes))
        padding = max_nodes - count
        tokens, parents = [999, *expected.tokens[0, 1:].tolist()], expected.parents[0].tolist()
        assert selected.trees.tokens[row].tolist() == tokens[:count] + [0] * padding
        assert selected.trees.parents[row].tolist() == parents[:count] + [-2] * padding
        assert int(selected.trees.num_nodes[row]) == count


def test_growth_at_a_fixed_width_reads_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a value read on the host or a list copied to the device, neither of which a captured graph can do."""
    choices = named_tree("medusa-63")
    indices = ShapeIndices.of(choices, torch.device("meta"))
    monkeypatch.delattr(torch, "tensor")
    growth = StaticGrowth(choices, indices)
    for level in range(1, choices.depth + 1):
        shape = (2, 1 if level == 1 else growth.frontier.tokens.shape[1], growth.num_candidates(level))
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        log_probs = torch.empty(shape, device="meta")
        growth.start(tokens[:, 0], log_probs[:, 0]) if level == 1 else growth.expand(tokens, log_probs)
    counts = torch.empty(2, dtype=torch.int64, device="meta")
    assert growth.finish(counts, counts, max_nodes=70).trees.parents.shape == (2, 70)


def test_drafts_begin_at_the_root() -> None:
    """Catches a level taken from a shape nobody has laid out."""
    growth = StaticGrowth(TreeChoices.cartesian([1]))
    with pytest.raises(RuntimeError, match="begins with `start`"):
        growth.finish(torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one path"),
        ([[]], r"\[\] is not a path of ranks"),
        ([[-1]], r"\[-1\] is not a path"),
        ([[True]], r"\[True\] is not a path"),
        ([["0"]], r"\['0'\] is not a path"),
        ([[0], [0]], r"\[0\] occurs twice"),
        ([[0], [1, 0]], r"\[1, 0\] lacks its parent \[1\]"),
    ],
)
def test_shapes_that_are_no_trees_are_refused(paths: list[list[int]], message: str) -> None:
    """Catches a node hung from the root because its parent is missing, and one counted twice."""
    with pytest.raises(ValueError, match=message):
        TreeChoices.of(paths)


def test_published_tree() -> None:
    """Catches a slip in the published list: its size, depth and width, and some of its paths."""
    choices = named_tree("medusa-63")
    assert (len(choices.paths), choices.depth) == (63, 4)
    assert [choices.num_candidates(level) for level in range(1, 5)] == [10, 10, 10, 2]
    assert [sum(len(path) == level for path in choices.paths) for level in range(1, 5)] == [10, 28, 23, 2]
    assert {(9, 0), (1, 6), (0, 9), (0, 0, 9), (0, 7, 0), (1, 0, 1), (0, 0, 0, 1)} <= set(choices.paths)


def test_named_trees(tmp_path: Path) -> None:
    """Catches a setting that names one shape and gets another."""
    assert named_tree("cartesian:4,2,2") == TreeChoices.cartesian([4, 2, 2])
    (tmp_path / "tree.json").write_text(json.dumps([[0, 1], [0], [2]]))
    assert named_tree(str(tmp_path / "tree.json")).paths == ((0,), (2,), (0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("medusa-64", "medusa-64 is unknown; use dynamic, cartesian:4,2,2, medusa-63"),
        ("cartesian:", "must list the width of every level"),
        ("cartesian:4,-2", "must list the width of every level"),
        ("cartesian:4,0", "widths of at least 1"),
        ("{}/none.json", "cannot be read"),
        ("{}/bad.json", "not valid JSON"),
        ("{}/object.json", "must hold a list of rank paths"),
        ("{}/orphan.json", "lacks its parent"),
    ],
)
def test_names_of_no_tree_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """Catches a misspelt tree being served as another one."""
    (tmp_path / "bad.json").write_text("[[0]")
    (tmp_path / "object.json").write_text('{"paths": [[0]]}')
    (tmp_path / "orphan.json").write_text("[[1, 0]]")
    with pytest.raises(ValueError, match=message):
        named_tree(text.format(tmp_path))
