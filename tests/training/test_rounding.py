from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eyas.training.rounding import rounded_up


@given(size=st.integers(0, 10_000), step=st.integers(1, 600))
def test_the_next_multiple(size: int, step: int) -> None:
    """Catches sizes that shrink, a whole step added to a multiple, and results that are none."""
    rounded = rounded_up(size, step)
    assert rounded % step == 0
    assert size <= rounded < size + step
