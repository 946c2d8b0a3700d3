"""The physical paged KV pool: slots addressed through page tables that the router hands out.

Target and drafter each own a pool; the page numbers and slots are the same on both sides, so a page granted, moved or
freed means the same token positions everywhere.

Letters: S slots, Hkv heads, D head dim, Dv head dim of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Size of a pool, shared by target and drafter."""

    num_pages: int
    page_size: int

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def slots_of(self, pages: list[int]) -> Tensor:
        """Slots of the given pages in text order, int64 `[len(pages) * page_size]`."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size
        return (first + torch.arange(self.page_size)).reshape(-1)


class KVPool:
    """Keys and values of every layer, in one block so that a move touches all layers at once.

    Args:
        value_head_dim: Dv where it differs from `head_dim`; keys and values then have a block each.

    Attributes:
        blocks: `[2 * layers, S, Hkv, D]`, or `[layers, S, Hkv, D]` and `[layers, S, Hkv, Dv]`; what `compact` moves.
        keys, values: each layer's view of them, `[S, Hkv, D]` and `[S, Hkv, Dv]`.
    """

    def __init__(
        self, layout: PoolLayout, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device, value_head_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout

        def block(count: int, width: int) -> Tensor:
            return torch.zeros((count, layout.num_slots, num_kv_heads, width), dtype=dtype, device=device)

        self.blocks: tuple[Tensor, ...]
        if value_head_dim is None or value_head_dim == head_dim:
            both = block(2 * num_layers, head_dim)
            self.blocks = (both,)
            self.keys, self.values = list(both[:num_layers]), list(both[num_layers:])
        else:
            self.blocks = (block(num_layers, head_dim), block(num_layers, value_head_dim))
            self.keys, self.values = list(self.blocks[0]), list(self.blocks[1])

    @property
    def caches(self) -> list[Tensor]:
        """Keys of every layer, then values of every layer."""
        return [*self.keys, *self.values]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows `[T, Hkv, D]` and `[T, Hkv, Dv]` at `slots [T]`."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)


class PageTable:
    """One request's pages as slots in text order; grows by whole pages."""

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.num_pages = 0

    def append(self, pages: list[int]) -> None:
        self.slots = torch.cat([self.slots, self._layout.slots_of(pages).to(self._device)])
        self.num_pages += len(pages)

    def range(self, start: int, stop: int) -> Tensor:
        """Slots of positions `start` to `stop - 1`.

        Raises:
            RuntimeError: if the router granted too few pages, which would otherwise corrupt another request.
        """
        if stop > self.slots.numel():
            raise RuntimeError(f"position {stop - 1} lies beyond the {self.slots.numel()} slots granted to the request")
        return self.slots[start:stop]
