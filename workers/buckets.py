"""Which sizes of step are recorded: a step runs in the smallest bucket that holds it, padded.

Letters: T rows of a step, B requests, N nodes of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A recorded size: `num_rows` nodes in all, of at most `batch` requests."""

    num_rows: int
    batch: int


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What the recorded steps must be able to hold.

    Args:
        max_batch: requests decoded together.
        max_nodes: nodes of one request, root included.
        draft_depth: levels below a root.
        max_pages: pages of one request.
        width: candidates kept per level.
    """

    max_batch: int
    max_nodes: int
    draft_depth: int
    max_pages: int
    width: int


def ladder(most: int) -> list[int]:
    """1, 2, 4 … up to `most`, which is always its last step."""
    if most < 1:
        raise ValueError(f"a ladder of sizes needs at least one step, got {most}")
    steps = [1]
    while steps[-1] < most:
        steps.append(min(steps[-1] * 2, most))
    return steps


def verify_buckets(limits: GraphLimits) -> list[Bucket]:
    """Every batch size of the ladder with every node count of the ladder for each of its requests, largest first.

    Largest first, because the first recording takes the memory that all later ones share.
    """
    buckets = {Bucket(batch * nodes, batch) for batch in ladder(limits.max_batch) for nodes in ladder(limits.max_nodes)}
    return sorted(buckets, reverse=True)


def smallest_bucket(buckets: Sequence[Bucket], num_rows: int, batch: int) -> Bucket:
    """The smallest bucket that holds so many rows and requests.

    Raises:
        ValueError: if none does.
    """
    fitting = [bucket for bucket in buckets if bucket.num_rows >= num_rows and bucket.batch >= batch]
    if not fitting:
        raise ValueError(f"no recorded step holds {num_rows} nodes of {batch} requests; the largest is {max(buckets)}")
    return min(fitting)
