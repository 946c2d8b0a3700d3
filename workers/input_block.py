"""The small inputs of a recorded step: named arrays in one block, filled on the host, copied to the device at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# In numbers of 8 bytes: Triton compiles a kernel once more for every pointer that is no multiple of 16 bytes.
_ALIGNMENT = 2


class InputBlock:
    """Attributes:
    host: int64 arrays by name, to be filled; `host_floats` gives one as float64.
    device: the same as tensors, whose addresses stay.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        places: dict[str, slice] = {}
        total = 0
        for name, shape in shapes.items():
            places[name] = slice(total, total + math.prod(shape))
            total += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        # Pinned, so that the copy does not wait; a step ends with a download, before the next one fills the block.
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self.host: dict[str, NDArray[np.int64]] = {}
        self.device: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            self.host[name] = self._host[places[name]].numpy().reshape(shape)
            self.device[name] = self._device[places[name]].view(shape)

    def host_floats(self, name: str) -> NDArray[np.float64]:
        """A field as float64, bit for bit."""
        return self.host[name].view(np.float64)

    def device_floats(self, name: str) -> Tensor:
        """The same field on the device, float64."""
        return self.device[name].view(torch.float64)

    def upload(self) -> None:
        """Copy all fields to the device."""
        self._device.copy_(self._host, non_blocking=True)


class PageRows:
    """Page tables of a batch in a buffer whose address stays, int32 `[B + 1, P]`; unused rows name the scratch page."""

    def __init__(self, max_batch: int, max_pages: int, scratch_page: int, device: torch.device) -> None:
        self._scratch_page = scratch_page
        self._host = torch.full(
            (max_batch + 1, max_pages), scratch_page, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.device = self._host.to(device, copy=True)
        self._filled: list[tuple[int, int]] = []

    def upload(self, request_ids: list[int], pages: list[list[int]], num_rows: int) -> None:
        """Set the first rows to the pages of these requests and the rest of `num_rows` to the scratch page.

        Nothing is copied when the same requests hold as many pages as last time: pages are only ever appended.
        """
        filled = [(request_id, len(own)) for request_id, own in zip(request_ids, pages, strict=True)]
        if filled == self._filled:
            return
        table = self._host.numpy()
        for row, own in enumerate(pages):
            table[row, : len(own)] = own
            table[row, len(own) :] = self._scratch_page
        table[len(pages) : max(num_rows, len(self._filled))] = self._scratch_page
        last = max(num_rows, len(self._filled), len(pages))
        self.device[:last].copy_(self._host[:last], non_blocking=True)
        self._filled = filled
