"""Attention of one step's rows over a paged pool, in segments of rows of like shape.

A step mixes prompt chunks and draft trees. The model sees flat rows; attention sees segments: the trees of all
decoding requests padded into one, each prompt chunk alone. Masks are made once per step and shared by all layers.

Letters: T rows of the step, B requests of a segment, N rows per request, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.attend import additive_mask, attend
from eyas.workers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that attend in one call.

    Args:
        rows: flat row of each padded query, int64 `[B, N]`; padding repeats any valid row.
        is_real: bool `[B, N]`, or None when nothing is padded.
        slots: slot of every key, int64 `[B, L]`.
        mask: see `kernels.attend.additive_mask`.
    """

    rows: Tensor
    is_real: Tensor | None
    slots: Tensor
    mask: Tensor

    @staticmethod
    def build(
        rows: Tensor, is_real: Tensor | None, slots: Tensor, mask: Tensor, group: int, dtype: torch.dtype
    ) -> Segment:
        """From a FULL mask, bool `[B, N, L]`."""
        return Segment(rows=rows, is_real=is_real, slots=slots, mask=additive_mask(mask, group, dtype))


class PagedAttention:
    """`Attention` over a `KVPool` for one step: writes all rows' keys and values, then attends segment by segment."""

    def __init__(self, pool: KVPool, row_slots: Tensor, segments: list[Segment]) -> None:
        self._pool = pool
        self._row_slots = row_slots
        self._segments = segments

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pool = self._pool
        pool.write(layer, self._row_slots, key, value)
        only = self._segments[0]
        if len(self._segments) == 1 and only.is_real is None:
            shaped = query.view(*only.rows.shape, *query.shape[1:])
            return attend(shaped, pool.keys[layer], pool.values[layer], only.slots, only.mask).flatten(0, 1)
        out = torch.empty_like(query)
        for segment in self._segments:
            attended = attend(query[segment.rows], pool.keys[layer], pool.values[layer], segment.slots, segment.mask)
            if segment.is_real is None:
                out[segment.rows.reshape(-1)] = attended.flatten(0, 1)
            else:
                out[segment.rows[segment.is_real]] = attended[segment.is_real]
        return out


def causal_segment(rows: Tensor, slots: Tensor, start: int, group: int, dtype: torch.dtype) -> Segment:
    """One request's consecutive rows `[N]` from position `start`, over the keys `slots [L]` of positions 0 … L - 1."""
    positions = torch.arange(start, start + rows.numel(), device=rows.device)
    mask = torch.arange(slots.numel(), device=rows.device) <= positions[:, None]
    return Segment.build(rows[None], None, slots[None], mask[None], group, dtype)
