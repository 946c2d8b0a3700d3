"""What every implementation of tree attention offers: declare, plan once per step, run once per layer.

Letters: T rows, Hq / Hkv query / key-value heads, D head dim, Dv head dim of the values, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.paged_rows import PagedRows


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """What is the same in every call of one engine's side."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


class PlannedAttention(Protocol):
    """One step's attention, run once per layer.

    Args:
        query: `[T, Hq, D]`, rotated; the rows of the plan, in its order.
        key_cache, value_cache: one layer's pool, `[S, Hkv, D]` and `[S, Hkv, Dv]`; the rows' own keys are written.

    Returns:
        `[T, Hq, Dv]`; rows past the plan's last one are undefined.
    """

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor: ...


class AttentionBackend(Protocol):
    """Made once per engine side, for one `AttentionGeometry`."""

    @property
    def mask_encoding(self) -> MaskEncoding:
        """The encoding `plan` reads."""
        ...

    def plan(self, rows: PagedRows) -> PlannedAttention:
        """Prepare a step; all host work of the step's attention happens here."""
        ...
