"""The physical paged KV pool: slots addressed through page tables that the router hands out.

Target and drafter each own a pool; the page numbers and slots are the same on both sides, so a page granted, moved or
freed means the same token positions everywhere.

Letters: S slots, Hkv heads, D head dim, Dv head dim of the values, B requests, P pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.kernels.attention_backend import AttentionGeometry


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Size of a pool, shared by target and drafter."""

    num_pages: int
    page_size: int

    @property
    def num_slots(self) -> int:
        """Slots of the pages that the router hands out."""
        return self.num_pages * self.page_size

    @property
    def scratch_page(self) -> int:
        """One page more, never handed out: padding rows of a recorded graph write there."""
        return self.num_pages

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
            S counts the scratch page's slots too.
        keys, values: each layer's view of them, `[S, Hkv, D]` and `[S, Hkv, Dv]`.
    """

    def __init__(
        self, layout: PoolLayout, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device, value_head_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout

        def block(count: int, width: int) -> Tensor:
            num_slots = layout.num_slots + layout.page_size
            return torch.zeros((count, num_slots, num_kv_heads, width), dtype=dtype, device=device)

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

    def geometry(self, num_heads: int) -> AttentionGeometry:
        """What attention of `num_heads` query heads over this pool looks like."""
        keys, values = self.keys[0], self.values[0]
        return AttentionGeometry(
            num_heads=num_heads,
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[2],
            value_head_dim=values.shape[2],
            page_size=self.layout.page_size,
            dtype=keys.dtype,
            device=keys.device,
        )

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows `[T, Hkv, D]` and `[T, Hkv, Dv]` at `slots [T]`."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)


class PageTable:
    """One request's pages as slots in text order; grows by whole pages.

    Attributes:
        page_ids, pages: the pages, on the host and int32 on the device.
    """

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self.page_ids: list[int] = []
        self.pages = torch.empty(0, dtype=torch.int32, device=device)

    @property
    def num_pages(self) -> int:
        return len(self.page_ids)

    def append(self, pages: list[int]) -> None:
        self.page_ids += pages
        self.slots = torch.cat([self.slots, self._layout.slots_of(pages).to(self._device)])
        self.pages = torch.cat([self.pages, torch.tensor(pages, dtype=torch.int32, device=self._device)])

    def range(self, start: int, stop: int) -> Tensor:
        """Slots of positions `start` to `stop - 1`.

        Raises:
            RuntimeError: if the router granted too few pages, which would otherwise corrupt another request.
        """
        if stop > self.slots.numel():
            raise RuntimeError(f"position {stop - 1} lies beyond the {self.slots.numel()} slots granted to the request")
        return self.slots[start:stop]


def page_table(tables: list[PageTable]) -> Tensor:
    """Pages of a batch of requests, int32 `[B, P]`; rows are padded with page 0."""
    if len(tables) == 1:
        return tables[0].pages[None]
    return pad_sequence([table.pages for table in tables], batch_first=True)
