"""Attention of one step's rows over a pool: all rows' keys and values are written, then each group of rows attends.

A step mixes draft trees and prompt chunks. The model sees flat rows; attention sees groups of like rows, one after the
other in the flat order, each planned once per step by the attention backend.

Letters: T rows of the step, B requests, N places per request, P pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.attention_backend import PlannedAttention
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.fused import REFERENCE, FusedOperations
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.workers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Consecutive rows of a step that attend together."""

    num_rows: int
    attend: PlannedAttention


class PagedAttention:
    """`Attention` over a `KVPool` for one step."""

    def __init__(
        self, pool: KVPool, row_slots: Tensor, groups: list[AttentionGroup], fused: FusedOperations = REFERENCE
    ) -> None:
        """Args:
        row_slots: where each row's own key and value go, int64 `[T]`.
        groups: cover the rows in their order; rows past them belong to nobody.
        """
        self._pool = pool
        self._fused = fused
        self._row_slots = row_slots
        self._groups = groups

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        self._pool.write(layer, self._row_slots, key, value)
        return self._attend(layer, query, options)

    def rotated(
        self, layer: int, qkv: Tensor, rotation: tuple[Tensor, Tensor], num_heads: int,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:  # fmt: skip
        """See `RotatingAttention`."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        query = self._fused.rotate_and_store(qkv, rotation, self._row_slots, keys, values, num_heads)
        return self._attend(layer, query, options)

    def _attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        if len(self._groups) == 1:
            return self._groups[0].attend(query, keys, values, options)
        parts = []
        first = 0
        for group in self._groups:
            parts.append(group.attend(query[first : first + group.num_rows], keys, values, options))
            first += group.num_rows
        return torch.cat(parts)


def causal_rows(starts: list[int], lengths: list[int], page_table: Tensor) -> PagedRows:
    """Consecutive rows of each request, `lengths[b]` from place `starts[b]` on, each seeing all places up to its own.

    Args:
        page_table: int32 `[B, P]`.
    """
    device = page_table.device
    first_rows = [0]
    for length in lengths:
        first_rows.append(first_rows[-1] + length)
    prefix = torch.tensor(starts, dtype=torch.int32, device=device)
    blocks = torch.tensor(lengths, dtype=torch.int32, device=device)
    return PagedRows(
        row_starts=torch.tensor(first_rows, dtype=torch.int32, device=device),
        prefix_lengths=prefix,
        block_lengths=blocks,
        page_table=page_table,
        mask=None,
        max_rows=max(lengths),
        max_block=max(lengths),
        max_prefix=max(starts),
    )


def slots_at(page_table: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Slots of cache places `[B, N]` through the page table, int32 `[B, P]`; int64 `[B, N]`."""
    pages = page_table.gather(1, places // page_size)
    return pages * page_size + places % page_size


def text_attention(pool: KVPool, num_heads: int, row_slots: Tensor, start: int = 0) -> PagedAttention:
    """Plain attention over one text on a pool of pages of one slot.

    Args:
        row_slots: slots of the text's places, int64; the rows are those from `start` on.
    """
    rows = causal_rows([start], [row_slots.numel() - start], row_slots[None].to(torch.int32))
    attend = ReferenceAttention(pool.geometry(num_heads)).plan(rows)
    return PagedAttention(pool, row_slots[start:], [AttentionGroup(row_slots.numel() - start, attend)])
