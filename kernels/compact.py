"""Moving the accepted path's keys and values to the front of the request's tree block."""

from __future__ import annotations

import torch
from torch import Tensor


def compact(caches: Tensor, source_slots: Tensor, destination_slots: Tensor) -> None:
    """Copy rows from `source_slots [M]` to `destination_slots [M]`, in place, in all caches `[C, S, ...]` at once.

    Source and destination may overlap: all sources are read before any destination is written.
    """
    if source_slots.shape != destination_slots.shape:
        raise ValueError(f"{source_slots.numel()} source slots for {destination_slots.numel()} destinations")
    if torch.equal(source_slots, destination_slots):
        return
    caches.index_copy_(1, destination_slots, caches.index_select(1, source_slots))
