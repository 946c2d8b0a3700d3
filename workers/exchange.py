"""HiddenStateExchange: a ring allocated once, through which a step's features go from target rank 0 to the drafter.

Rank 0 copies a step's feature rows into the next slot and names slot, sequence number and ring generation in its
`StepOutcome`; the drafter copies them out and releases the slot. Where the slots lie follows from the device, here and
nowhere else.

Letters: R rows, F = captured layers * hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eyas.workers.cuda_exchange import CudaExchange, CudaRingHandle
from eyas.workers.cuda_ipc import TorchCudaRuntime
from eyas.workers.ring import RingHandle, RingShape
from eyas.workers.shared_memory_exchange import SharedMemoryExchange


class HiddenStateExchange(Protocol):
    """One side of the ring. The producer creates it; the consumer attaches; then the producer unlinks its name."""

    handle: RingHandle

    def unlink(self) -> None:
        """Remove the ring's name, once the consumer has attached: nothing is left however the processes end."""

    def publish(self, features: Tensor, timeout_s: float) -> tuple[int, int]:
        """Copy `features [R, F]` into the next slot; returns (slot, sequence).

        Raises:
            TimeoutError: if the consumer does not release the slot in time.
            ValueError: if the rows do not fit a slot.
        """
        ...

    def take(self, slot: int, sequence: int, num_rows: int) -> Tensor:
        """Copy `num_rows` rows out of a published slot and release it.

        Raises:
            RuntimeError: if the slot holds another step's rows.
        """
        ...


def create_exchange(shape: RingShape, device: torch.device) -> HiddenStateExchange:
    """Allocate a ring where a target on `device` publishes: device memory on a GPU, else shared memory."""
    if device.type == "cuda":
        return CudaExchange.create(shape, TorchCudaRuntime(device))
    return SharedMemoryExchange.create(shape)


def attach_exchange(handle: RingHandle, device: torch.device) -> HiddenStateExchange:
    """Open the ring that a target created, for a drafter on `device`.

    Raises:
        RuntimeError: if the ring cannot be reached from here; the reason is in the message.
    """
    if isinstance(handle, CudaRingHandle):
        return CudaExchange.attach(handle, TorchCudaRuntime(device))
    return SharedMemoryExchange.attach(handle)
