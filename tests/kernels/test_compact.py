from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from eyas.kernels.compact import compact

PagedSlots = Callable[[list[int], int], list[Tensor]]

NUM_NODES = 6
# Every path a tree of six nodes can have: the root, then ascending nodes.
PATHS = [[0, *rest] for length in range(NUM_NODES) for rest in combinations(range(1, NUM_NODES), length)]


def random_caches(num_slots: int) -> Tensor:
    """Keys and values of two layers; every row differs."""
    generator = torch.Generator().manual_seed(num_slots)
    return torch.randn(4, num_slots, 2, 3, generator=generator)


def copied_by_hand(cache: Tensor, source_slots: list[int], destination_slots: list[int]) -> Tensor:
    copy = cache.clone()
    for source, destination in zip(source_slots, destination_slots, strict=True):
        copy[destination] = cache[source]
    return copy


def check(source_slots: list[int], destination_slots: list[int], num_slots: int) -> None:
    caches = random_caches(num_slots)
    expected = [copied_by_hand(cache, source_slots, destination_slots) for cache in caches]
    compact(caches, torch.tensor(source_slots), torch.tensor(destination_slots))
    for cache, copy in zip(caches, expected, strict=True):
        assert torch.equal(cache, copy)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_path_moves_to_the_front_of_the_block(page_size: int, paged_slots: PagedSlots) -> None:
    """Catches slots that assume neighbouring pages, for every prefix length modulo the page; other rows stay."""
    for index, prefix in enumerate(range(page_size, 2 * page_size)):
        (slots,) = paged_slots([prefix + NUM_NODES], page_size)
        num_slots = int(slots.max()) // page_size * page_size + page_size
        for path in PATHS[index % 4 :: 4] if page_size > 1 else PATHS:
            source = [int(slots[prefix + node]) for node in path]
            check(source, slots[prefix : prefix + len(path)].tolist(), num_slots)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_requests_move_together(page_size: int, paged_slots: PagedSlots) -> None:
    """Catches one request's rows written into another's block when a batch is moved in one call."""
    prefixes = [page_size - 1, page_size, page_size + 3]
    paths = [[0, 2, 5], [0], [0, 1, 3, 4]]
    blocks = paged_slots([prefix + NUM_NODES for prefix in prefixes], page_size)
    source, destination = [], []
    for slots, prefix, path in zip(blocks, prefixes, paths, strict=True):
        source += [int(slots[prefix + node]) for node in path]
        destination += slots[prefix : prefix + len(path)].tolist()
    check(source, destination, max(int(slots.max()) for slots in blocks) + page_size)


@pytest.mark.parametrize(
    ("source_slots", "destination_slots"),
    [
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]),
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]),
        ([2, 0, 1], [0, 1, 2]),
        ([3, 1], [1, 3]),
    ],
    ids=["down", "up", "reversed", "rotated", "swapped"],
)
def test_sources_are_read_before_destinations_are_written(
    source_slots: list[int], destination_slots: list[int]
) -> None:
    """Catches row-by-row copying, in either direction, over an overlap."""
    check(source_slots, destination_slots, num_slots=8)


@pytest.mark.parametrize("slots", [[], [3], [4, 1, 2]])
def test_rows_in_place_stay(slots: list[int]) -> None:
    """Catches an empty or idle move that touches the cache."""
    check(slots, slots, num_slots=8)


@pytest.mark.parametrize(
    ("source_slots", "destination_slots"),
    [
        ([[2, 0, 1, -1], [5, 6, 7, -1]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[-1, 3, -1], [-1, -1, -1]], [[0, 1, 2], [5, 6, 7]]),
        ([[-1, -1]], [[0, 1]]),
    ],
    ids=["ragged", "gaps and a padding request", "none"],
)
def test_negative_sources_do_not_move(source_slots: list[list[int]], destination_slots: list[list[int]]) -> None:
    """Catches the last slot, which an index of -1 names, copied to the end of a shorter path."""
    caches = random_caches(8)
    pairs = zip(sum(source_slots, []), sum(destination_slots, []), strict=True)
    moves = [(source, destination) for source, destination in pairs if source >= 0]
    expected = [copied_by_hand(cache, [a for a, _ in moves], [b for _, b in moves]) for cache in caches]
    compact(caches, torch.tensor(source_slots), torch.tensor(destination_slots))
    assert torch.equal(caches, torch.stack(expected))


def test_each_source_needs_a_destination() -> None:
    """Catches a short index list being broadcast over the other."""
    with pytest.raises(ValueError, match="3 source slots for 1 destinations"):
        compact(random_caches(8), torch.tensor([1, 2, 3]), torch.tensor([0]))
