"""Attention of one step's rows over a paged pool, in segments of rows of like shape.

A step mixes prompt chunks and draft trees. The model sees flat rows; attention sees segments: the trees of all
decoding requests padded into one, each prompt chunk alone. Masks are made once per step and shared by all layers, one
more for each size of window among them.

Letters: T rows of the step, B requests of a segment, N rows per request, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.attend import additive_mask, attend, windowed_mask
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.workers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that attend in one call.

    Args:
        rows: flat row of each padded query, int64 `[B, N]`; padding repeats any valid row.
        is_real: bool `[B, N]`, or None when nothing is padded.
        slots: slot of every key, int64 `[B, L]`.
        mask: see `kernels.attend.additive_mask`.
        query_positions, key_positions: text positions, int64 `[B, N]` and `[B, L]`, which only windows need; padded
            queries have their repeated row's.
    """

    rows: Tensor
    is_real: Tensor | None
    slots: Tensor
    mask: Tensor
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    _windowed: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def build(
        rows: Tensor,
        is_real: Tensor | None,
        slots: Tensor,
        mask: Tensor,
        group: int,
        dtype: torch.dtype,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Segment:
        """From a FULL mask, bool `[B, N, L]`."""
        return Segment(
            rows=rows,
            is_real=is_real,
            slots=slots,
            mask=additive_mask(mask, group, dtype),
            query_positions=query_positions,
            key_positions=key_positions,
        )

    def mask_within(self, window: int | None) -> Tensor:
        """The mask of layers with this window; the first of them makes it.

        Raises:
            RuntimeError: for a window on a segment built without positions.
        """
        if window is None:
            return self.mask
        if window not in self._windowed:
            if self.query_positions is None or self.key_positions is None:
                raise RuntimeError(f"a layer attends within {window} positions, but its segment has no positions")
            cuts = int(self.query_positions.max()) >= window
            self._windowed[window] = (
                windowed_mask(self.mask, window, self.query_positions, self.key_positions) if cuts else self.mask
            )
        return self._windowed[window]


class PagedAttention:
    """`Attention` over a `KVPool` for one step: writes all rows' keys and values, then attends segment by segment."""

    def __init__(self, pool: KVPool, row_slots: Tensor, segments: list[Segment]) -> None:
        self._pool = pool
        self._row_slots = row_slots
        self._segments = segments

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        self._pool.write(layer, self._row_slots, key, value)
        only = self._segments[0]
        if len(self._segments) == 1 and only.is_real is None:
            shaped = query.view(*only.rows.shape, *query.shape[1:])
            return self._attend(layer, shaped, only, options).flatten(0, 1)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for segment in self._segments:
            attended = self._attend(layer, query[segment.rows], segment, options)
            if segment.is_real is None:
                out[segment.rows.reshape(-1)] = attended.flatten(0, 1)
            else:
                out[segment.rows[segment.is_real]] = attended[segment.is_real]
        return out

    def _attend(self, layer: int, query: Tensor, segment: Segment, options: AttentionOptions) -> Tensor:
        return attend(
            query,
            self._pool.keys[layer],
            self._pool.values[layer],
            segment.slots,
            segment.mask_within(options.window),
            options.scale,
            options.softcap,
            options.sinks,
        )


def causal_segment(rows: Tensor, slots: Tensor, start: int, group: int, dtype: torch.dtype) -> Segment:
    """One request's consecutive rows `[N]` from position `start`, over the keys `slots [L]` of positions 0 … L - 1."""
    positions = torch.arange(start, start + rows.numel(), device=rows.device)
    key_positions = torch.arange(slots.numel(), device=rows.device)
    mask = key_positions <= positions[:, None]
    return Segment.build(
        rows[None], None, slots[None], mask[None], group, dtype,
        query_positions=positions[None], key_positions=key_positions[None],
    )  # fmt: skip


def tree_key_positions(depths: Tensor, committed: Tensor, num_keys: int) -> Tensor:
    """Text position of each key of a batch of trees, `[B, L]`: the prefix in order, then the nodes `depths [B, N]`.

    Columns past a request's last node are padding and get any position.
    """
    columns = torch.arange(num_keys, device=depths.device)
    nodes = (columns - committed[:, None]).clamp(0, depths.shape[1] - 1)
    return torch.where(columns < committed[:, None], columns, committed[:, None] + depths.gather(1, nodes))
