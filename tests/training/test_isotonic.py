from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.training.isotonic import rising

PAIRS = st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 50)), min_size=1, max_size=8)


@given(PAIRS)
def test_the_result_is_the_nearest_rising_sequence(pairs: list[tuple[float, float]]) -> None:
    """Catches pools that are not merged on, and weights lost in a merge: the min-max form of the solution."""
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]

    def mean(first: int, last: int) -> float:
        span = range(first, last + 1)
        return sum(values[i] * weights[i] for i in span) / sum(weights[i] for i in span)

    count = len(values)
    expected = [max(min(mean(i, j) for j in range(k, count)) for i in range(k + 1)) for k in range(count)]
    assert rising(values, weights) == pytest.approx(expected, abs=1e-9)
