from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eyas.training.packing import in_groups

SIZES = st.lists(st.integers(1, 30), max_size=40)


@given(SIZES, st.integers(1, 20))
def test_groups_hold_all_in_order_and_are_as_full_as_they_can_be(sizes: list[int], limit: int) -> None:
    """Catches an item lost, moved or repeated, a group above its limit, and one ended while the next item had room."""
    groups = in_groups(sizes, lambda size: size, limit)
    assert [size for group in groups for size in group] == sizes
    assert all(len(group) == 1 or sum(group) <= limit for group in groups)
    assert all(sum(group) + following[0] > limit for group, following in zip(groups, groups[1:], strict=False))


def test_nothing_makes_no_group() -> None:
    """Catches an empty batch where a rank validates nothing."""
    assert in_groups([], len, 5) == []
