"""How well probabilities foretell: a reliability diagram over fixed buckets, and the expected calibration error.

Source: Guo, Pleiss, Sun, Weinberger, arXiv:1706.04599, section 2. Buckets are narrow near 0, where most edges of a tree
lie.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

BUCKET_BOUNDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(slots=True)
class Bucket:
    """Events whose probability lies in `[low, high)`; the last bucket holds 1 as well."""

    low: float
    high: float
    num_edges: int = 0
    num_accepted: int = 0
    total_probability: float = 0.0

    @property
    def mean_probability(self) -> float | None:
        return self.total_probability / self.num_edges if self.num_edges else None

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted / self.num_edges if self.num_edges else None


def _empty_buckets() -> list[Bucket]:
    return [Bucket(low, high) for low, high in zip(BUCKET_BOUNDS, BUCKET_BOUNDS[1:], strict=False)]


@dataclass(slots=True)
class CalibrationCurve:
    """Probabilities of edges against how often they were accepted, given that their parent was."""

    buckets: list[Bucket] = field(default_factory=_empty_buckets)

    @property
    def num_edges(self) -> int:
        return sum(bucket.num_edges for bucket in self.buckets)

    def add(self, probability: float, is_accepted: bool) -> None:
        """Count one edge.

        Raises:
            ValueError: for what is no probability.
        """
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"{probability} is no probability")
        bucket = self.buckets[min(bisect_right(BUCKET_BOUNDS, probability), len(self.buckets)) - 1]
        bucket.num_edges += 1
        bucket.num_accepted += is_accepted
        bucket.total_probability += probability

    @property
    def expected_error(self) -> float | None:
        """Mean distance between probability and acceptance, buckets weighted by their edges; None without any."""
        if not self.num_edges:
            return None
        return sum(abs(each.total_probability - each.num_accepted) for each in self.buckets) / self.num_edges
