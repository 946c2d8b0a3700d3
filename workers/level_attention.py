"""Attention of the levels of one draft: a drafted node sees the covered positions and its own ancestors.

Reads no device value on the host, so that a whole draft can be recorded as one graph.

Letters: B requests, E nodes of a level, K nodes of all levels so far, P pages of a request, S width of a head's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.attention_backend import AttentionBackend
from eyas.kernels.fused import REFERENCE, FusedOperations
from eyas.kernels.paged_rows import PagedRows
from eyas.models.attention import Attention, no_attention
from eyas.models.head import DraftHead
from eyas.workers.block_mask import encode_block_mask
from eyas.workers.kv_pool import KVPool
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, slots_at


class LevelAttention:
    """Keys of the drafted levels of one draft: level after level, their nodes lie above the covered positions."""

    def __init__(
        self, head: DraftHead, pool: KVPool | None, backend: AttentionBackend | None,
        page_table: Tensor, covered: Tensor, max_covered: int,
        fused: FusedOperations = REFERENCE,
    ) -> None:  # fmt: skip
        """Args:
        pool, backend: None for a head that keeps no cache.
        page_table: int32 `[B, P]`.
        covered: positions of each request that have draft KV already, int64 `[B]`.
        max_covered: bound of them.
        """
        self._head = head
        self._pool = pool
        self._backend = backend
        self._page_table = page_table
        self._covered = covered
        self._max_covered = max_covered
        self._fused = fused
        self._num_levels = 0
        self._ancestors: Tensor | None = None  # bool [B, E, K]
        self._level_widths: list[int] = []

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
        self._level_widths.append(width)
        positions = (self._covered + self._num_levels).repeat_interleave(width)
        self._num_levels += 1
        attention = self._attention(positions)
        states = self._head.step(parent_states.flatten(0, 1), tokens.flatten(), positions, attention)
        return states.view(batch, width, -1)

    def _attention(self, positions: Tensor) -> Attention:
        if self._pool is None or self._backend is None or self._ancestors is None:
            return no_attention
        device, covered = self._head.device, self._covered
        batch, width, block = self._ancestors.shape
        own_places = covered[:, None] + torch.arange(block - width, block, device=device)
        levels = torch.cat(
            [torch.full((nodes,), level, device=device) for level, nodes in enumerate(self._level_widths)]
        )
        rows = PagedRows(
            row_starts=torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=device),
            prefix_lengths=covered.to(torch.int32),
            block_lengths=torch.full((batch,), block, dtype=torch.int32, device=device),
            page_table=self._page_table,
            mask=encode_block_mask(self._ancestors, covered, self._backend.mask_encoding, self._max_covered),
            max_rows=width,
            max_block=block,
            max_prefix=self._max_covered,
            query_positions=positions,
            key_positions=covered[:, None] + levels,
        )
        row_slots = slots_at(self._page_table, own_places, self._pool.layout.page_size).reshape(-1)
        return PagedAttention(
            self._pool, row_slots, [AttentionGroup(batch * width, self._backend.plan(rows))], self._fused
        )
