"""Moving the accepted path's keys and values to the front of the request's tree block.

Slots are plain indices into the pool, so the page size plays no part here.

Letters: C caches (keys and values of all layers), S slots, B requests, A accepted path entries, M rows to move.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compact(caches: Tensor, source_slots: Tensor, destination_slots: Tensor) -> None:
    """Copy rows from source to destination slots, in place, in all caches `[C, S, ...]` at once.

    Source and destination of a request may overlap: all its sources are read before any of its destinations is
    written. Slots of different requests never overlap.

    Args:
        source_slots: int64 `[B, A]`, or `[M]` for the rows of one request; a negative one stands for nothing to move.
        destination_slots: of the same shape; no two rows that move share one.
    """
    if source_slots.shape != destination_slots.shape:
        raise ValueError(f"{source_slots.numel()} source slots for {destination_slots.numel()} destinations")
    if torch.equal(source_slots, destination_slots):
        return
    moves = source_slots >= 0
    caches.index_copy_(1, destination_slots[moves], caches.index_select(1, source_slots[moves]))
