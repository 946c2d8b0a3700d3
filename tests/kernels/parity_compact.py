"""Moves of accepted rows: `kernels.compact` against `kernels.triton_compact`, bit for bit in the whole pool."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import compact, triton_compact

NUM_NODES = 6


def random_caches(num_slots: int, shape: tuple[int, ...] = (2, 8), dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys and values of two layers; every row differs."""
    generator = torch.Generator().manual_seed(num_slots)
    return torch.randn(4, num_slots, *shape, generator=generator).to(DEVICE, dtype)


def compare(caches: Tensor, source: list[list[int]], destination: list[list[int]]) -> None:
    """Both moves must leave the same pool; as rows of requests, and as one list where there is one request."""
    sources = torch.tensor(source, dtype=torch.int64, device=DEVICE)
    destinations = torch.tensor(destination, dtype=torch.int64, device=DEVICE)
    expected, moved = caches.clone(), caches.clone()
    compact.compact(expected, sources, destinations)
    triton_compact.compact(moved, sources, destinations)
    assert torch.equal(bits_of(moved), bits_of(expected))
    if len(source) == 1:
        listed = caches.clone()
        triton_compact.compact(listed, sources[0], destinations[0])
        assert torch.equal(bits_of(listed), bits_of(expected))


def bits_of(caches: Tensor) -> Tensor:
    return caches.view({2: torch.int16, 4: torch.int32}[caches.element_size()])


def paged_slots(lengths: list[int], page_size: int) -> list[list[int]]:
    """Slots of each request's positions, the requests' pages shuffled among each other."""
    num_pages = [-(-length // page_size) for length in lengths]
    pages = list(range(sum(num_pages)))
    random.Random(page_size).shuffle(pages)
    slots = []
    for length, count in zip(lengths, num_pages, strict=True):
        own, pages = pages[:count], pages[count:]
        slots.append([own[place // page_size] * page_size + place % page_size for place in range(length)])
    return slots


def move_paths(page_size: int) -> None:
    """Four requests whose tree blocks begin before, at and after the start of a page; one of them is padding."""
    prefixes = [page_size - 1, page_size, page_size + 3, 2 * page_size - 2]
    paths = [[0, 2, 5, -1], [0, 1, 3, 4], [-1, -1, -1, -1], [0, 4, -1, -1]]
    blocks = paged_slots([prefix + NUM_NODES for prefix in prefixes], page_size)
    source = [
        [slots[prefix + node] if node >= 0 else -1 for node in path]
        for slots, prefix, path in zip(blocks, prefixes, paths, strict=True)
    ]
    destination = [slots[prefix : prefix + 4] for slots, prefix in zip(blocks, prefixes, strict=True)]
    compare(random_caches(max(map(max, blocks)) + 1), source, destination)


def page_size_1() -> None:
    """Catches slots that assume neighbours, where every token has a page of its own."""
    move_paths(1)


def page_size_16() -> None:
    """Catches a block whose rows go on in the next page taken to go on in the next slot."""
    move_paths(16)


def page_size_64() -> None:
    """Catches the same in pages longer than a path."""
    move_paths(64)


def overlaps() -> None:
    """Catches rows written before others that lie there are read, in any direction."""
    caches = random_caches(8)
    compare(caches, [[1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4]])
    compare(caches, [[0, 1, 2, 3, 4]], [[1, 2, 3, 4, 5]])
    compare(caches, [[0, 1, 2, 3, 4, 5]], [[5, 4, 3, 2, 1, 0]])
    compare(caches, [[2, 0, 1], [7, 6, -1]], [[0, 1, 2], [6, 7, 3]])


def nothing_to_move() -> None:
    """Catches idle rows that are written: negative sources, and rows already in place."""
    compare(random_caches(9), [[-1, -1], [3, 4]], [[0, 1], [3, 4]])


def negative_sources_between() -> None:
    """Catches rows counted up to the first idle one, and a destination written for it."""
    compare(random_caches(9), [[-1, 5, -1, 7]], [[0, 1, 2, 3]])


def depth_one() -> None:
    """Catches a path of one row, or of the root and one node."""
    compare(random_caches(9), [[4]], [[1]])
    compare(random_caches(9), [[0, 5], [6, 8]], [[0, 1], [6, 7]])


def rows_64() -> None:
    """Catches a path as long as the longest allowed that is cut."""
    compare(random_caches(70), [list(range(6, 70))], [list(range(64))])


def elements_that_fill_no_tile() -> None:
    """Catches the last elements of a slot left behind, or the next slot's first ones carried along."""
    for shape in ((3, 5), (1,), (5, 80), (9, 128)):
        compare(random_caches(40, shape), [[3, 9, 21, 20], [30, 33, -1, 39]], [[0, 1, 2, 3], [30, 31, 32, 33]])


def half_precisions_with_nan() -> None:
    """Catches values that are converted on the way: the pool's bits must move, those of NaN as well."""
    for dtype in (torch.bfloat16, torch.float16):
        caches = random_caches(12, (4, 16), dtype)
        caches.view(torch.int16)[:, 5] = 0x7FC1
        caches[:, 6] = -torch.inf
        compare(caches, [[4, 5, 6, 9]], [[4, 1, 2, 3]])


def empty_batch() -> None:
    """Catches a launch of no programs, which CUDA refuses."""
    caches = random_caches(4)
    none = torch.empty(0, 3, dtype=torch.int64, device=DEVICE)
    before = caches.clone()
    for slots in (none, none.flatten()):
        compact.compact(caches, slots, slots)
        triton_compact.compact(caches, slots, slots)
    assert torch.equal(caches, before)


REGIMES: list[Callable[[], None]] = [
    page_size_1,
    page_size_16,
    page_size_64,
    overlaps,
    nothing_to_move,
    negative_sources_between,
    depth_one,
    rows_64,
    elements_that_fill_no_tile,
    half_precisions_with_nan,
    empty_batch,
]
CASES = [ParityCase("compact", "triton", regime.__name__, regime) for regime in REGIMES]
