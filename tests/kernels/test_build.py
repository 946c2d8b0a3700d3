from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import DEVICE
from parity_build import compare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.kernels.build import (
    MaskEncoding,
    ancestor_mask,
    build_layout,
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
    words = packed_mask(ancestor_mask(trees)).to(torch.int64).squeeze(2)
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
        (65, torch.uint64),
        (128, torch.uint64),
        (129, torch.uint64),
    ],
)
@pytest.mark.parametrize("shape", [chain, star])
def test_packed_mask_round_trip(shape: Callable[[int], DraftTrees], num_nodes: int, dtype: torch.dtype) -> None:
    """Catches a word one bit too narrow, one size too wide, or losing its sign bit, and a 65th node in the first."""
    mask = ancestor_mask(shape(num_nodes))
    packed = packed_mask(mask)
    assert packed.dtype == dtype
    assert packed.shape == (1, num_nodes, -(-num_nodes // 64))
    assert torch.equal(unpack_mask(packed, num_nodes), mask)


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


@given(trees=TREES, prefixes=PREFIXES, num_padding=st.integers(0, 2))
def test_layout_is_all_of_it(trees: DraftTrees, prefixes: list[int], num_padding: int) -> None:
    """Catches parts of a layout that belong to different trees, and padding requests that disturb the others."""
    rows = trees.batch_size
    committed = torch.tensor(prefixes[:rows] + [7] * num_padding)
    padded = DraftTrees(
        tokens=torch.nn.functional.pad(trees.tokens, (0, 0, 0, num_padding)),
        parents=torch.nn.functional.pad(trees.parents, (0, 0, 0, num_padding), value=-2),
        num_nodes=torch.nn.functional.pad(trees.num_nodes, (0, num_padding)),
    )
    tree_mask = ancestor_mask(padded)
    max_keys = max(prefixes) + trees.max_nodes
    masks = {
        MaskEncoding.FULL: full_mask(tree_mask, committed, padded.num_nodes, max_keys),
        MaskEncoding.TREE_ONLY: tree_mask,
        MaskEncoding.PACKED: packed_mask(tree_mask),
    }
    for encoding, mask in masks.items():
        layout = build_layout(
            padded.parents, padded.num_nodes, committed, encoding, max_keys if encoding is MaskEncoding.FULL else None
        )
        assert torch.equal(layout.mask, mask)
        assert layout.is_tree.all()
        assert torch.equal(layout.positions, node_positions(node_depths(padded), committed))
        assert torch.equal(layout.links.first_child[:rows], tree_links(trees).first_child)
        assert torch.equal(layout.links.next_sibling[:rows], tree_links(trees).next_sibling)
        assert bool((layout.links.first_child[rows:] == -1).all())


@st.composite
def parent_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Parents `[B, N]` and counts `[B]`: trees, most of them with one number changed to some other."""
    width = draw(st.integers(1, 6))
    rows, counts = [], []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, width))
        row = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))] + [-2] * (width - count)
        if draw(st.booleans()):
            row[draw(st.integers(0, width - 1))] = draw(st.integers(-3, width + 1))
        rows.append(row)
        counts.append(draw(st.sampled_from([count, count, count - 1, count + 1])))
    return torch.tensor(rows), torch.tensor(counts)


@given(rows=parent_rows())
def test_is_tree_agrees_with_validation(rows: tuple[Tensor, Tensor]) -> None:
    """Catches a missing parent taken for the root, and a climb through parents that lead round in circles."""
    parents, counts = rows
    layout = build_layout(parents, counts, torch.zeros_like(counts), MaskEncoding.TREE_ONLY)
    distinct = torch.arange(parents.shape[1]).expand(1, -1)
    for row, is_tree in enumerate(layout.is_tree.tolist()):
        if counts[row] == 0:
            assert is_tree == bool((parents[row] == -2).all())
            continue
        trees = DraftTrees(distinct, parents[row : row + 1], counts[row : row + 1])
        try:
            trees.validate()
        except ValueError:
            assert not is_tree
            assert torch.equal(layout.mask[row], torch.eye(parents.shape[1], dtype=torch.bool))
            assert bool((layout.positions[row] == 0).all())
            assert bool((layout.links.first_child[row] == -1).all())
        else:
            assert is_tree
            assert torch.equal(layout.mask[row], ancestor_mask(trees)[0])


@settings(max_examples=40)
@given(rows=parent_rows(), prefixes=PREFIXES)
def test_triton_lays_out_whatever_it_is_given(rows: tuple[Tensor, Tensor], prefixes: list[int]) -> None:
    """Catches faults in parents that the parity matrix does not list."""
    parents, counts = rows
    compare(parents.to(DEVICE), counts.tolist(), prefixes[: len(counts)])


class LargestTensor(TorchDispatchMode):
    """Watches the bytes of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


def test_bytes_of_a_step() -> None:
    """Catches a prefix written for a backend that does not read it: 67 MB of mask where 2 KB would do."""
    batch, context, num_nodes = 256, 32_768, 8
    parents = star(num_nodes).parents.repeat(batch, 1)
    counts, committed = torch.full((batch,), num_nodes), torch.full((batch,), context)
    written, largest = {}, {}
    for encoding in MaskEncoding:
        max_keys = context + num_nodes if encoding is MaskEncoding.FULL else None
        with LargestTensor() as watched:
            mask = build_layout(parents, counts, committed, encoding, max_keys).mask
        written[encoding], largest[encoding] = mask.numel() * mask.element_size(), watched.num_bytes
    assert written == {
        MaskEncoding.FULL: batch * num_nodes * (context + num_nodes),
        MaskEncoding.TREE_ONLY: batch * num_nodes * num_nodes,
        MaskEncoding.PACKED: batch * num_nodes,
    }
    assert round(written[MaskEncoding.FULL] / 1e6) == 67  # MB, KB, KB
    assert (written[MaskEncoding.TREE_ONLY] / 1024, written[MaskEncoding.PACKED] / 1024) == (16, 2)
    assert largest[MaskEncoding.FULL] >= written[MaskEncoding.FULL]
    assert max(largest[MaskEncoding.TREE_ONLY], largest[MaskEncoding.PACKED]) < written[MaskEncoding.FULL] / 50


def test_columns_are_for_full_masks() -> None:
    """Catches a FULL mask sized by reading lengths back from the device, and columns that nobody would fill."""
    trees, lengths = chain(2), torch.tensor([3])
    with pytest.raises(ValueError, match="a full mask needs max_keys, got None"):
        build_layout(trees.parents, trees.num_nodes, lengths, MaskEncoding.FULL)
    with pytest.raises(ValueError, match="a packed mask has no max_keys, got 5"):
        build_layout(trees.parents, trees.num_nodes, lengths, MaskEncoding.PACKED, max_keys=5)
