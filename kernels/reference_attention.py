"""Tree attention over paged rows in plain torch: the definition the other backends are compared with, and the CPU path.

A plan turns the page table into slots and the mask into the form `attend` adds to its logits; layers share both, and
one more mask for each size of window among them. Rows under a mask are padded into one call; causal rows are attended
request by request, so that a prompt chunk is never padded to another's keys. Causal rows are text in its order: each
stands at the position of its own place, and no positions need be given.

It reads lengths on the host, so on a GPU it waits for the device.

Letters: B requests, T rows of all of them, N rows of a request, L keys, Hq query heads, D head dim, Dv of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.attend import additive_mask, attend, windowed_mask
from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.paged_rows import PagedRows


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows that attend in one call.

    Args:
        rows: flat row of each padded query, int64 `[B, N]`; None where the segment is the next B * N rows as they are.
        real: the unpadded ones among the B * N, int64; None where all are.
        slots: slot of every key, int64 `[B, L]`.
        mask: additive, see `attend.additive_mask`.
        query_positions, key_positions: text positions, `[B, N]` and `[B, L]`; None where the rows have none.
    """

    rows: Tensor | None
    real: Tensor | None
    slots: Tensor
    mask: Tensor
    shape: tuple[int, int]
    query_positions: Tensor | None
    key_positions: Tensor | None
    _windowed: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def mask_within(self, window: int | None) -> Tensor:
        """The mask of layers with this window; the first of them makes it."""
        if window is None:
            return self.mask
        if window not in self._windowed:
            if self.query_positions is None or self.key_positions is None:
                raise ValueError(f"a layer attends within {window} positions, but its rows were planned without any")
            cuts = int(self.query_positions.max()) >= window
            self._windowed[window] = (
                windowed_mask(self.mask, window, self.query_positions, self.key_positions) if cuts else self.mask
            )
        return self._windowed[window]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of the segment's own rows, without padding, from the rows it is given."""
        shaped = query.view(*self.shape, *query.shape[1:]) if self.rows is None else query[self.rows]
        mask = self.mask_within(options.window)
        out = attend(
            shaped, key_cache, value_cache, self.slots, mask, options.scale, options.softcap, options.sinks
        ).flatten(0, 1)
        return out if self.real is None else out.index_select(0, self.real)


class PlannedReference:
    """One step's attention, see `PlannedAttention`."""

    def __init__(self, segments: list[_Segment], ends: list[int]) -> None:
        """Args:
        ends: flat row after each segment's last.
        """
        self._segments = segments
        self._ends = ends

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        if len(self._segments) == 1 and self._ends[0] == query.shape[0]:
            return self._segments[0].attend(query, key_cache, value_cache, options)
        out = query.new_empty(*query.shape[:2], value_cache.shape[-1])
        start = 0
        for segment, end in zip(self._segments, self._ends, strict=True):
            out[start:end] = segment.attend(query[start:end], key_cache, value_cache, options)
            start = end
        return out


class ReferenceAttention:
    """`AttentionBackend` over `attend`, on any device and in any dtype torch computes with."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self._geometry = geometry
        self._page_offsets = torch.arange(geometry.page_size, device=geometry.device)

    @property
    def mask_encoding(self) -> MaskEncoding:
        return MaskEncoding.FULL

    def plan(self, rows: PagedRows) -> PlannedReference:
        """Slots and masks of a step; those of a window wait for the first layer that has it.

        Raises:
            ValueError: for a mask that is not FULL, or reaches past the page table.
        """
        starts = rows.row_starts.tolist()
        if starts[-1] == 0:
            return PlannedReference([], [])
        if rows.mask is not None:
            return PlannedReference([self._masked(rows, rows.mask, starts)], [starts[-1]])
        busy = [b for b in range(rows.batch_size) if starts[b + 1] > starts[b]]
        prefixes = rows.prefix_lengths.tolist()
        segments = [self._causal(rows, b, starts[b], starts[b + 1], prefixes[b]) for b in busy]
        return PlannedReference(segments, [starts[b + 1] for b in busy])

    def _masked(self, rows: PagedRows, mask: Tensor, starts: list[int]) -> _Segment:
        batch, max_rows, num_keys = mask.shape
        lengths = (rows.prefix_lengths + rows.block_lengths).tolist()
        if mask.dtype != torch.bool or batch != rows.batch_size or num_keys < max(lengths):
            raise ValueError(
                f"expected a FULL mask, bool [{rows.batch_size}, rows, {max(lengths)} keys or more], "
                f"got {mask.dtype} {list(mask.shape)}"
            )
        slots = self._slots(rows.page_table, num_keys)
        if min(lengths) < num_keys:
            # A hidden key still meets its weight of 0, so padding must not point at what others left in the pool.
            is_own = torch.arange(num_keys, device=mask.device) < torch.tensor(lengths, device=mask.device)[:, None]
            slots = torch.where(is_own, slots, slots[:, :1])
        flat = real = None
        if starts[-1] < batch * max_rows:
            first = rows.row_starts[:-1, None]
            places = torch.arange(max_rows, device=mask.device)
            is_real = places < rows.row_starts[1:, None] - first
            flat = (first + torch.where(is_real, places, 0)).clamp_(max=starts[-1] - 1)
            real = is_real.flatten().nonzero().flatten()
        query_positions = key_positions = None
        if rows.query_positions is not None and rows.key_positions is not None:
            positions = rows.query_positions[: starts[-1]]
            query_positions = positions.view(batch, max_rows) if flat is None else positions[flat]
            columns = torch.arange(num_keys, device=mask.device)
            places = columns - rows.prefix_lengths[:, None]
            in_block = places.clamp(0, rows.key_positions.shape[1] - 1)
            key_positions = torch.where(places < 0, columns, rows.key_positions.gather(1, in_block))
        return _Segment(
            rows=flat,
            real=real,
            slots=slots,
            mask=additive_mask(mask, self._geometry.group, self._geometry.dtype),
            shape=(batch, max_rows),
            query_positions=query_positions,
            key_positions=key_positions,
        )

    def _causal(self, rows: PagedRows, request: int, start: int, end: int, prefix: int) -> _Segment:
        count = end - start
        columns = torch.arange(prefix + count, device=rows.page_table.device)
        mask = columns <= columns[prefix:, None]
        return _Segment(
            rows=None,
            real=None,
            slots=self._slots(rows.page_table[request : request + 1], prefix + count),
            mask=additive_mask(mask[None], self._geometry.group, self._geometry.dtype),
            shape=(1, count),
            query_positions=columns[None, prefix:],
            key_positions=columns[None],
        )

    def _slots(self, page_table: Tensor, num_keys: int) -> Tensor:
        """Slots of the first places of every request, `[B, L]`."""
        page_size = self._geometry.page_size
        num_places = page_table.shape[1] * page_size
        if num_keys > num_places:
            raise ValueError(f"{num_keys} keys lie beyond the {num_places} places of the page table")
        pages = page_table[:, : -(-num_keys // page_size)].long()
        return (pages[:, :, None] * page_size + self._page_offsets).flatten(1)[:, :num_keys].contiguous()
