"""Tensor parallelism as a model and its runner see it: a rank, and the three collectives they need.

Each sends what its arguments' shapes say and nothing that depends on values, and allocates its result whole: on NCCL
all three can be captured in a CUDA graph. Every rank must call them in the same order with the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it and warns under the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a tensor-parallel group.

    Args:
        group: process group of the ranks; None when there is only one.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def shard(self, weight: Tensor, dim: int) -> Tensor:
        """This rank's slice of a full weight along `dim`, whose length the group size must divide."""
        if self.size == 1:
            return weight
        if weight.shape[dim] % self.size:
            raise ValueError(f"dimension {dim} of {tuple(weight.shape)} cannot be split over {self.size} ranks")
        return weight.chunk(self.size, dim=dim)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """Sum of every rank's `x`, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def concatenate(self, x: Tensor) -> Tensor:
        """Every rank's `x [..., n]` joined along the last dimension in rank order, `[..., size * n]`."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * x.numel())
        _all_gather(parts, x.contiguous().view(-1), group=self.group)
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, values: Tensor, width: int) -> Tensor:
        """Rank 0's `values [n]` on every rank, sent as `width` values whatever n is.

        Args:
            values: of the same length and dtype on all ranks; only rank 0's content counts.
            width: at least n; the same in every call that shall send the same amount, as a step's bucket is.

        Raises:
            ValueError: for more values than `width`.
        """
        count = values.shape[0]
        if count > width:
            raise ValueError(f"{count} values cannot be broadcast at a width of {width}")
        if self.size == 1:
            return values
        padded = values.new_zeros(width)
        padded[:count] = values
        dist.broadcast(padded, group=self.group, group_src=0)
        return padded[:count]
