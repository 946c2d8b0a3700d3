"""Counts of accepted drafts as the figures that are reported."""

from __future__ import annotations

from typing import Any

from eyas.deployments.acceptance_counts import AcceptanceCounts
from eyas.deployments.calibration_curve import CalibrationCurve


def acceptance_figures(counts: AcceptanceCounts, has_prior: bool) -> dict[str, Any]:
    """The part of a shape's report that follows from its counts alone; keys as in `evaluation`.

    Args:
        has_prior: whether growth took other probabilities than the head's.
    """
    depths = range(1, max(counts.proposed, default=0) + 1)
    return {
        "acceptance_length": counts.acceptance_length,
        "num_steps": counts.num_steps,
        "num_tokens": counts.num_tokens,
        "num_cut_steps": counts.num_cut,
        "num_accepted": counts.num_accepted,
        "by_depth": [
            {
                "depth": depth,
                **_shares(counts.proposed[depth], counts.accepted[depth]),
                "reached": counts.accepted[depth] / counts.num_steps,
            }
            for depth in depths
        ],
        "by_rank": [
            [
                {"rank": rank, **_shares(counts.rank_proposed[depth, rank], counts.rank_accepted[depth, rank])}
                for rank in range(1, max(each for at, each in counts.rank_proposed if at == depth) + 1)
            ]
            for depth in depths
        ],
        "calibration": {"raw": _calibration(counts.raw), "used": _calibration(counts.used) if has_prior else None},
    }


def _shares(num_proposed: int, num_accepted: int) -> dict[str, Any]:
    return {
        "num_proposed": num_proposed,
        "num_accepted": num_accepted,
        "acceptance": num_accepted / num_proposed if num_proposed else None,
    }


def _calibration(curve: CalibrationCurve) -> dict[str, Any]:
    return {
        "expected_calibration_error": curve.expected_error,
        "num_edges": curve.num_edges,
        "buckets": [
            {
                "low": bucket.low,
                "high": bucket.high,
                "num_edges": bucket.num_edges,
                "num_accepted": bucket.num_accepted,
                "mean_probability": bucket.mean_probability,
                "acceptance": bucket.acceptance,
            }
            for bucket in curve.buckets
        ],
    }
