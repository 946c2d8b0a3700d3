"""Moving the accepted path's keys and values to the front of the request's tree block."""

from __future__ import annotations

import torch
from torch import Tensor


def compact(caches: list[Tensor], source_slots: Tensor, destination_slots: Tensor) -> None:
    """Copy cache rows from `source_slots [M]` to `destination_slots [M]`, in place, in every cache `[S, ...]`.

    Source and destination may overlap: all sources are read before any destination is written.
    """
    if source_slots.shape != destination_slots.shape:
        raise ValueError(f"{source_slots.numel()} source slots for {destination_slots.numel()} destinations")
    if torch.equal(source_slots, destination_slots):
        return
    for cache in caches:
        cache[destination_slots] = cache[source_slots]
