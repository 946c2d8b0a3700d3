from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.deployments.pages import PageAllocator


@given(num_pages=st.integers(1, 20), rng=st.randoms(use_true_random=False))
def test_pages_are_conserved(num_pages: int, rng: random.Random) -> None:
    """Catches a page that two owners hold, or that nobody can ever get again."""
    allocator = PageAllocator(num_pages, page_size=4)
    held: list[list[int]] = []
    for _ in range(60):
        if held and rng.random() < 0.5:
            allocator.free(held.pop(rng.randrange(len(held))))
        else:
            wanted, num_free = rng.randint(0, num_pages + 1), allocator.num_free
            pages = allocator.allocate(wanted)
            assert (pages is None) == (wanted > num_free)
            if pages is not None:
                assert len(pages) == wanted
                held.append(pages)
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(taken)


def test_pages_that_hold_slots() -> None:
    """Catches one page too few at a page's edge, or one too many."""
    allocator = PageAllocator(9, page_size=4)
    assert [allocator.pages_for(slots) for slots in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_refusal_takes_nothing() -> None:
    """Catches pages lost to a request that could not be admitted."""
    allocator = PageAllocator(3, page_size=4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert sorted(allocator.allocate(3) or []) == [0, 1, 2]


@pytest.mark.parametrize("pages", [[1, 1], [0, 2], [2]])
def test_double_free_is_an_error(pages: list[int]) -> None:
    """Catches a page handed to two requests later, far from the fault, and a failed call that frees half its pages."""
    allocator = PageAllocator(3, page_size=4)
    assert allocator.allocate(2) == [0, 1]
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(pages)
    assert allocator.num_free == 1


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (3, 0), (-1, 4)])
def test_empty_pools_are_refused(num_pages: int, page_size: int) -> None:
    """Catches a pool in which no request could ever start."""
    with pytest.raises(ValueError, match="must be at least 1"):
        PageAllocator(num_pages, page_size)
