"""Attention of the levels of one draft: a drafted node sees the covered positions and its own ancestors.

Letters: B requests, E nodes of a level, L keys, S width of a head's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.models.attention import Attention, no_attention
from eyas.models.head import DraftHead
from eyas.workers.kv_pool import KVPool, PageTable
from eyas.workers.segments import PagedAttention, Segment, tree_key_positions


class LevelAttention:
    """Keys of the drafted levels of one draft: level after level, their nodes lie above the covered positions."""

    def __init__(self, head: DraftHead, pool: KVPool | None, tables: list[PageTable], covered: list[int]) -> None:
        """Args:
        pool: None for a head that keeps no cache.
        tables: pages of each request, `[B]`.
        covered: positions of each that have draft KV already, `[B]`.
        """
        self._head = head
        self._pool = pool
        self._tables = tables
        self._num_covered = covered
        self._covered = torch.tensor(covered, device=head.device)
        self._num_levels = 0
        self._ancestors: Tensor | None = None  # bool [B, E, nodes of all levels so far]
        self._levels: list[int] = []  # level of each of these nodes, the first being 0

    def step(self, parent_states: Tensor, tokens: Tensor, parent_ranks: Tensor) -> Tensor:
        """Run the head over one level of nodes `[B, E]`; returns their states `[B, E, S]`."""
        batch, width = tokens.shape
        own = torch.eye(width, dtype=torch.bool, device=self._head.device).expand(batch, width, width)
        if self._ancestors is None:
            ancestors = own
        else:
            inherited = self._ancestors.gather(1, parent_ranks[:, :, None].expand(-1, -1, self._ancestors.shape[2]))
            ancestors = torch.cat([inherited, own], dim=2)
        self._ancestors = ancestors
        self._levels += [self._num_levels] * width
        positions = (self._covered + self._num_levels)[:, None].expand(-1, width)
        self._num_levels += 1
        attention = self._attention(positions)
        states = self._head.step(parent_states.flatten(0, 1), tokens.flatten(), positions.flatten(), attention)
        return states.view(batch, width, -1)

    def _attention(self, positions: Tensor) -> Attention:
        cache = self._head.cache
        if self._pool is None or cache is None or self._ancestors is None:
            return no_attention
        device, covered = self._head.device, self._covered
        batch, width, block = self._ancestors.shape
        max_keys = max(self._num_covered) + block
        columns = torch.arange(max_keys, device=device) - covered[:, None]  # [B, L]
        in_block = (columns >= 0) & (columns < block)
        visible = self._ancestors.gather(2, columns.clamp(0, block - 1)[:, None].expand(-1, width, -1))
        mask = (columns < 0)[:, None] | (in_block[:, None] & visible)
        key_slots, row_slots = [], []
        for table, num_covered in zip(self._tables, self._num_covered, strict=True):
            slots = table.range(0, num_covered + block)
            row_slots.append(slots[-width:])
            key_slots.append(torch.nn.functional.pad(slots, (0, max_keys - slots.numel()), value=int(slots[0])))
        rows = torch.arange(batch * width, device=device).view(batch, width)
        levels = torch.tensor(self._levels, device=device).expand(batch, -1)
        segment = Segment.build(
            rows, None, torch.stack(key_slots), mask, cache.group, self._head.dtype,
            query_positions=positions, key_positions=tree_key_positions(levels, covered, max_keys),
        )  # fmt: skip
        return PagedAttention(self._pool, torch.cat(row_slots), [segment])
