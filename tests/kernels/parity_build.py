"""Layouts of trees: `kernels.build` against `kernels.triton_build`, every result of every encoding."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import build, triton_build
from eyas.kernels.build import MaskEncoding
from eyas.kernels.triton_build import PREFIX_BLOCK

Row = list[int]  # parents of one request's nodes


def chain(num_nodes: int) -> Row:
    return list(range(-1, num_nodes - 1))


def star(num_nodes: int) -> Row:
    return [-1] + [0] * (num_nodes - 1)


def random_tree(num_nodes: int, seed: int) -> Row:
    rng = random.Random(seed)
    return [-1, *(rng.randrange(max(0, node - 9), node) for node in range(1, num_nodes))]


def padded(rows: list[Row], width: int = 0) -> Tensor:
    width = max(width, *(len(row) for row in rows))
    return torch.tensor([row + [-2] * (width - len(row)) for row in rows], device=DEVICE)


def compare(parents: Tensor, num_nodes: list[int], committed: list[int]) -> None:
    counts, prefixes = (torch.tensor(each, dtype=torch.int64, device=DEVICE) for each in (num_nodes, committed))
    most = max((count + prefix for count, prefix in zip(num_nodes, committed, strict=True)), default=1)
    for encoding in MaskEncoding:
        max_keys = most + 3 if encoding is MaskEncoding.FULL else None  # a bound, not the exact size
        expected = build.build_layout(parents, counts, prefixes, encoding, max_keys)
        layout = triton_build.build_layout(parents, counts, prefixes, encoding, max_keys)
        assert layout.mask.dtype == expected.mask.dtype
        assert layout.mask.shape == expected.mask.shape
        assert torch.equal(as_signed(layout.mask), as_signed(expected.mask))
        assert torch.equal(layout.positions, expected.positions)
        assert torch.equal(layout.links.first_child, expected.links.first_child)
        assert torch.equal(layout.links.next_sibling, expected.links.next_sibling)
        assert torch.equal(layout.is_tree, expected.is_tree)


def as_signed(mask: Tensor) -> Tensor:
    """The same bits in a type that comparisons are defined for."""
    return mask.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mask.element_size()])


def check_rows(rows: list[Row], committed: list[int], width: int = 0) -> None:
    compare(padded(rows, width), [len(row) for row in rows], committed)


def one_node() -> None:
    """Catches anything that needs a second node."""
    check_rows([[-1], [-1]], [0, 17])


def width_one() -> None:
    """Catches a chain whose mask is not causal, at sizes below, at and above a block of nodes."""
    check_rows([chain(7), chain(16), chain(17)], [0, 3, 5])


def depth_one() -> None:
    """Catches siblings that see or position each other."""
    check_rows([star(5), star(20), star(33)], [1, 0, 4])


def ragged_with_padding_requests() -> None:
    """Catches a request of no nodes that gets links, or an empty mask row, which softmax turns into NaN."""
    check_rows([random_tree(6, 0), [], random_tree(13, 1), [], [-1]], [4, 0, 9, 5, 0])


def wider_than_any_request() -> None:
    """Catches rows taken to be as long as their largest request: captured graphs pad further."""
    check_rows([random_tree(5, 2), random_tree(9, 3)], [2, 0], width=24)


def prefixes_about_a_block() -> None:
    """Catches a FULL prefix written one column short or long where its tiles, or a page, begin anew."""
    rows = [random_tree(3, seed) for seed in range(5)]
    check_rows(rows, [PREFIX_BLOCK - 3, PREFIX_BLOCK - 2, PREFIX_BLOCK - 1, PREFIX_BLOCK, PREFIX_BLOCK + 1])


def nodes_64() -> None:
    """Catches a word that loses bit 63, its sign."""
    check_rows([chain(64), star(64), random_tree(64, 4)], [0, 1, 2])


def nodes_65_and_more() -> None:
    """Catches a 65th node that wraps onto the bit of the first, and parents sought in another block of nodes."""
    check_rows([chain(65), random_tree(70, 5)], [3, 0])


def rows_that_are_no_trees() -> None:
    """Catches a missing parent treated as the root, a climb that never ends, and a fault that spoils its neighbours."""
    faulty = [
        [-1, 0, -1, 1],
        [-1, 1, 0, 1],
        [-1, 2, 1, 0],
        [-1, 0, 3, 0],
        [-1, 0, 99, 1],
        [-1, 0, -2, 1],
        [0, 0, 1, 1],
        [-2, 0, 1, 1],
    ]
    good = [-1, 0, 0, 2]
    rows = [row for fault in faulty for row in (fault, good)]
    compare(padded(rows, 6), [4] * len(rows), list(range(len(rows))))


def counts_that_are_none() -> None:
    """Catches node counts below 0 or beyond the row, and nodes left in what the count declares to be padding."""
    parents = padded([[-1, 0, 1], [-1, 0, 1], [-1, 0, 1], [-1, 0, 1]])
    compare(parents, [-1, 4, 2, 3], [1, 2, 3, 4])


def empty_batch() -> None:
    """Catches a launch of no programs, which CUDA refuses."""
    compare(torch.empty(0, 4, dtype=torch.int64, device=DEVICE), [], [])


REGIMES: list[Callable[[], None]] = [
    one_node,
    width_one,
    depth_one,
    ragged_with_padding_requests,
    wider_than_any_request,
    prefixes_about_a_block,
    nodes_64,
    nodes_65_and_more,
    rows_that_are_no_trees,
    counts_that_are_none,
    empty_batch,
]
CASES = [ParityCase("build", "triton", regime.__name__, regime) for regime in REGIMES]
