"""Paged rows as FlashInfer's paged kernels address them: page numbers of all requests in a row, masks as flat bools.

Sizes come from lengths that the host has read already, so nothing here waits for the device.

Letters: B requests, T rows of all of them, N rows of a request, K places of a block, L keys of a request, S slots,
Hkv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.paged_rows import PagedRows

MAX_MASK_BITS = 2**31 - 1  # the library counts them in int32


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """The keys that each request's rows meet in one call.

    Args:
        page_size: slots of a page as this call counts them.
        starts: first of each request's pages among `pages`, int32 `[B + 1]` on the host.
        pages: page numbers of all requests, int32.
        last_lengths: keys in each request's last page, 0 without pages, int32 `[B]` on the host.
    """

    page_size: int
    starts: Tensor
    pages: Tensor
    last_lengths: Tensor

    def view(self, cache: Tensor) -> Tensor:
        """A pool `[S, Hkv, D]` as pages `[S / page_size, page_size, Hkv, D]`."""
        if cache.shape[0] % self.page_size:
            raise ValueError(f"a pool of {cache.shape[0]} slots does not consist of pages of {self.page_size}")
        return cache.view(-1, self.page_size, *cache.shape[1:])


def of_busy(rows: PagedRows, lengths: Tensor) -> Tensor:
    """`lengths [B]` with 0 for requests without rows, whose own may mean nothing."""
    return torch.where(rows.row_starts.diff() > 0, lengths, 0)


def paged_keys(page_table: Tensor, lengths: Tensor, host_lengths: Tensor, page_size: int) -> PagedKeys:
    """The first `lengths [B]` places of every request; `host_lengths` are the same on the host."""
    host_counts = (host_lengths + (page_size - 1)) // page_size
    most = max([0, *host_counts.tolist()])
    if most > page_table.shape[1]:
        raise ValueError(f"{most} pages lie beyond the {page_table.shape[1]} of the page table")
    starts = F.pad(host_counts.cumsum(0), (1, 0)).int()
    total, device = int(starts[-1]), page_table.device
    counts = (lengths + (page_size - 1)) // page_size
    owners = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=total)
    columns = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[owners]
    last_lengths = host_lengths - (host_counts - 1).clamp(min=0) * page_size
    return PagedKeys(page_size, starts, page_table[owners, columns], last_lengths)


def block_keys(rows: PagedRows, num_places: int, page_size: int) -> PagedKeys:
    """K places of every request's block as pages of one slot, since a block begins and ends anywhere in a page.

    Past a block's last place stands that one again, which `block_mask` hides: a hidden value is still multiplied by its
    weight of 0, and another slot might hold a NaN.
    """
    offsets = torch.arange(num_places, device=rows.page_table.device)
    last = (rows.block_lengths - 1).clamp(min=0)
    places = rows.prefix_lengths[:, None] + torch.minimum(offsets, last[:, None])
    places = torch.where((rows.row_starts.diff() > 0)[:, None], places, 0)
    slots = rows.page_table.gather(1, places // page_size) * page_size + places % page_size
    starts = torch.arange(rows.batch_size + 1, dtype=torch.int32) * num_places
    return PagedKeys(1, starts, slots.int().flatten(), torch.ones(rows.batch_size, dtype=torch.int32))


def block_mask(rows: PagedRows, mask: Tensor, num_rows: int) -> Tensor:
    """A TREE_ONLY mask over `block_keys`, row after row, bool `[T * K]`."""
    device = mask.device
    requests = torch.arange(rows.batch_size, device=device)
    owners = torch.repeat_interleave(requests, rows.row_starts.diff(), output_size=num_rows)
    own_rows = torch.arange(num_rows, device=device) - rows.row_starts[owners]
    in_block = torch.arange(mask.shape[2], device=device) < rows.block_lengths[owners, None]
    return (mask[owners, own_rows] & in_block).flatten()


def check_full_mask(mask: Tensor, row_starts: Tensor, lengths: Tensor) -> None:
    """Raise `ValueError` unless `mask` is FULL over `lengths [B]` keys and has no more bits than can be counted."""
    most = max([0, *lengths.tolist()])
    if mask.dtype != torch.bool or mask.shape[0] != len(lengths) or mask.shape[2] < most:
        raise ValueError(
            f"expected a FULL mask, bool [{len(lengths)}, rows, {most} keys or more], "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    num_bits = int((row_starts.diff().long() * lengths).sum())
    if num_bits > MAX_MASK_BITS:
        raise ValueError(
            f"attention_backend: flashinfer counts the bits of a step's mask in int32, and this one has {num_bits}; "
            "use flashinfer-cascade, which has none for the prefix"
        )


def full_mask(rows: PagedRows, mask: Tensor, row_starts: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """A FULL mask over the first `lengths` keys, each request's rows after the last one's, bool `[sum of N L]`.

    Args:
        row_starts, lengths: on the host.
        window: also hides what lies `window` or more positions before its row.
    """
    if window is not None:
        mask = mask & ~_beyond(window, rows, mask.shape[1], mask.shape[2], int(row_starts[-1]))
    sizes = zip(mask, row_starts.diff().tolist(), lengths.tolist(), strict=True)
    return torch.cat([own[:count, :length].flatten() for own, count, length in sizes])


def _beyond(window: int, rows: PagedRows, max_rows: int, max_keys: int, num_rows: int) -> Tensor:
    """Which keys lie before the window of which rows, bool `[B, N, L]`."""
    if rows.query_positions is None or rows.key_positions is None:
        raise ValueError(f"a layer attends within {window} positions, but its rows were planned without any")
    device = rows.page_table.device
    own_rows = rows.row_starts[:-1, None] + torch.arange(max_rows, device=device)
    query_positions = rows.query_positions[own_rows.clamp(max=num_rows - 1)]
    columns = torch.arange(max_keys, device=device)
    places = columns - rows.prefix_lengths[:, None]
    in_block = rows.key_positions.gather(1, places.clamp(0, rows.key_positions.shape[1] - 1))
    key_positions = torch.where(places < 0, columns, in_block)
    return key_positions[:, None] <= query_positions[:, :, None] - window
