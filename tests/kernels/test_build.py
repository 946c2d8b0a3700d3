from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.kernels.build import (
    ancestor_mask,
    full_mask,
    node_depths,
    node_positions,
    packed_mask,
    tree_links,
    unpack_mask,
)
from eyas.kernels.tree import DraftTrees, pad_trees, root_trees

RootPath = Callable[[DraftTrees, int, int], list[int]]

TREES = st.from_type(DraftTrees)
PREFIXES = st.lists(st.integers(0, 9), min_size=4, max_size=4)


def chain(num_nodes: int) -> DraftTrees:
    return pad_trees([(list(range(num_nodes)), list(range(-1, num_nodes - 1)))])


def star(num_nodes: int) -> DraftTrees:
    return pad_trees([(list(range(num_nodes)), [-1] + [0] * (num_nodes - 1))])


@given(trees=TREES, prefixes=PREFIXES)
def test_positions_follow_depth(trees: DraftTrees, prefixes: list[int], root_path: RootPath) -> None:
    """Catches positions counted by node index, so that siblings would get different RoPE angles."""
    committed = torch.tensor(prefixes[: trees.batch_size])
    depths = node_depths(trees)
    positions = node_positions(depths, committed)
    for row in range(trees.batch_size):
        count = int(trees.num_nodes[row])
        expected = [len(root_path(trees, row, node)) - 1 for node in range(count)]
        assert depths[row].tolist() == expected + [0] * (trees.max_nodes - count)
        assert positions[row, :count].tolist() == [prefixes[row] + depth for depth in expected]


@given(trees=TREES)
def test_ancestor_mask_is_the_walk_up(trees: DraftTrees, root_path: RootPath) -> None:
    """Catches a node that sees a sibling, a cousin or a descendant, or misses an ancestor."""
    mask = ancestor_mask(trees)
    for row in range(trees.batch_size):
        for node in range(trees.max_nodes):
            expected = root_path(trees, row, node) if node < trees.num_nodes[row] else [node]
            assert mask[row, node].nonzero().flatten().tolist() == expected


@given(trees=TREES, prefixes=PREFIXES)
def test_full_mask_is_prefix_and_walk_up(trees: DraftTrees, prefixes: list[int], root_path: RootPath) -> None:
    """Catches tree columns that ignore each request's own prefix length, and empty rows in the padding."""
    prefixes = prefixes[: trees.batch_size]
    mask = full_mask(ancestor_mask(trees), torch.tensor(prefixes), trees.num_nodes)
    counts = trees.num_nodes.tolist()
    num_keys = max(prefix + count for prefix, count in zip(prefixes, counts, strict=True))
    assert mask.shape == (trees.batch_size, trees.max_nodes, num_keys)
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        for node in range(trees.max_nodes):
            seen = root_path(trees, row, node) if node < count else [0]
            expected = [*range(prefix), *(prefix + ancestor for ancestor in seen)]
            assert mask[row, node].nonzero().flatten().tolist() == expected


@given(trees=TREES)
def test_packed_mask_of_any_tree(trees: DraftTrees, root_path: RootPath) -> None:
    """Catches bits in the wrong order: bit j of row i must say whether i sees j."""
    words = packed_mask(ancestor_mask(trees)).to(torch.int64)
    for row in range(trees.batch_size):
        for node in range(int(trees.num_nodes[row])):
            assert int(words[row, node]) == sum(1 << ancestor for ancestor in root_path(trees, row, node))


@pytest.mark.parametrize(
    ("num_nodes", "dtype"),
    [
        (1, torch.uint8),
        (8, torch.uint8),
        (9, torch.uint16),
        (16, torch.uint16),
        (17, torch.uint32),
        (32, torch.uint32),
        (33, torch.uint64),
        (64, torch.uint64),
    ],
)
@pytest.mark.parametrize("shape", [chain, star])
def test_packed_mask_round_trip(shape: Callable[[int], DraftTrees], num_nodes: int, dtype: torch.dtype) -> None:
    """Catches a word one bit too narrow, one size too wide, or losing its sign bit."""
    mask = ancestor_mask(shape(num_nodes))
    packed = packed_mask(mask)
    assert packed.dtype == dtype
    assert packed.shape == (1, num_nodes)
    assert torch.equal(unpack_mask(packed, num_nodes), mask)


def test_packed_mask_refuses_what_no_integer_holds() -> None:
    """Catches a 65th node silently wrapping onto the bit of the first."""
    with pytest.raises(ValueError, match="at most 64 nodes, got 65; use the tree_only encoding"):
        packed_mask(ancestor_mask(chain(65)))


@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_chain_is_causal(num_nodes: int) -> None:
    """Catches a width-1 tree that differs from ordinary causal decoding."""
    trees = chain(num_nodes)
    assert node_depths(trees).tolist() == [list(range(num_nodes))]
    assert torch.equal(ancestor_mask(trees)[0], torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril())
    full = full_mask(ancestor_mask(trees), torch.tensor([3]), trees.num_nodes)
    assert torch.equal(full[0], torch.ones(num_nodes, num_nodes + 3, dtype=torch.bool).tril(diagonal=3))
    links = tree_links(trees)
    assert links.first_child.tolist() == [[*range(1, num_nodes), -1]]
    assert links.next_sibling.tolist() == [[-1] * num_nodes]


def test_root_alone() -> None:
    """Catches anything that needs a second node."""
    trees = root_trees(torch.tensor([5, 6]))
    assert node_depths(trees).tolist() == [[0], [0]]
    assert ancestor_mask(trees).tolist() == [[[True]], [[True]]]
    full = full_mask(ancestor_mask(trees), torch.tensor([0, 2]), trees.num_nodes)
    assert full.tolist() == [[[True, False, False]], [[True, True, True]]]
    assert tree_links(trees).first_child.tolist() == [[-1], [-1]]


@given(trees=TREES)
def test_links_visit_exactly_the_children(trees: DraftTrees) -> None:
    """Catches a child that no link reaches, one reached twice, and links into padding or across parents."""
    links = tree_links(trees)
    for row in range(trees.batch_size):
        for node in range(trees.max_nodes):
            visited = []
            child = int(links.first_child[row, node])
            while child >= 0:
                visited.append(child)
                assert len(visited) < trees.max_nodes
                child = int(links.next_sibling[row, child])
            assert visited == (trees.parents[row] == node).nonzero().flatten().tolist()
        assert links.next_sibling[row, 0] == -1
        assert bool((links.next_sibling[row, int(trees.num_nodes[row]) :] == -1).all())
