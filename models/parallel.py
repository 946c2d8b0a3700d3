"""Tensor parallelism as a model sees it: its rank, and the two collectives it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
        """Every rank's `x` joined along the last dimension in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
