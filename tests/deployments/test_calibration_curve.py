"""Reliability diagrams."""

from __future__ import annotations

import math

import pytest

from eyas.deployments.calibration_curve import BUCKET_BOUNDS, CalibrationCurve


def test_every_probability_has_one_bucket() -> None:
    """Catches a bound that two buckets or none take, and a 1 that falls off the end."""
    curve = CalibrationCurve()
    for bound in BUCKET_BOUNDS:
        curve.add(bound, True)
        curve.add(math.nextafter(bound, 0.0), False)
    *others, last = curve.buckets
    assert [bucket.num_accepted for bucket in others] == [1] * 11
    assert (curve.buckets[0].num_edges, last.num_accepted) == (3, 2)
    assert curve.num_edges == 26
    for bucket in others:
        assert bucket.mean_probability is not None
        assert bucket.low <= bucket.mean_probability < bucket.high


def test_expected_error_is_the_weighted_distance() -> None:
    """Catches buckets that count alike however few edges they hold, and distances that cancel out."""
    curve = CalibrationCurve()
    for is_accepted in (True, True, True, False):
        curve.add(0.55, is_accepted)  # 0.75 accepted: 0.2 too low
    curve.add(0.95, False)  # 0.95 too high
    assert curve.expected_error == pytest.approx((4 * 0.2 + 1 * 0.95) / 5)
    bucket = curve.buckets[BUCKET_BOUNDS.index(0.5)]
    assert (bucket.num_edges, bucket.num_accepted, bucket.acceptance) == (4, 3, 0.75)
    assert bucket.mean_probability == pytest.approx(0.55)


def test_nothing_is_known_of_no_edges() -> None:
    """Catches a division by zero, and a perfect score of a head that never drafted."""
    curve = CalibrationCurve()
    assert curve.expected_error is None
    assert {(bucket.acceptance, bucket.mean_probability) for bucket in curve.buckets} == {(None, None)}


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(probability: float) -> None:
    """Catches log-probabilities given for probabilities, counted as if nothing had happened."""
    with pytest.raises(ValueError, match="is no probability"):
        CalibrationCurve().add(probability, True)
