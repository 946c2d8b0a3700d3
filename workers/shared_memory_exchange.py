"""The exchange of engines without a GPU: slots in POSIX shared memory, copied in and out by the CPU.

The control message that names a slot orders the accesses, so there are no locks.

Letters: R rows, F features of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.workers.ring import RingHandle, RingShape, RingWords, new_generation
from eyas.workers.shared_memory import SharedMemory


class SharedMemoryExchange:
    """One side of the ring; see `HiddenStateExchange`."""

    def __init__(self, handle: RingHandle, memory: SharedMemory) -> None:
        shape = handle.shape
        self.handle = handle
        self._memory = memory
        self._words = RingWords(memory, shape)
        self._rows = torch.frombuffer(
            memory.buffer,
            dtype=shape.torch_dtype,
            count=shape.num_slots * shape.max_rows * shape.row_size,
            offset=shape.num_word_bytes,
        ).view(shape.num_slots, shape.max_rows, shape.row_size)

    @staticmethod
    def create(shape: RingShape) -> SharedMemoryExchange:
        """Allocate a ring.

        Raises:
            RuntimeError: if the node has no room for it.
        """
        memory = SharedMemory.create(shape.num_word_bytes + shape.num_bytes)
        ring = SharedMemoryExchange(RingHandle(memory.name, new_generation(), shape), memory)
        ring._words.begin(ring.handle.generation)
        return ring

    @staticmethod
    def attach(handle: RingHandle) -> SharedMemoryExchange:
        """Open a peer's ring.

        Raises:
            RuntimeError: if it is not on this node, or the memory under its name belongs to another run.
        """
        memory = SharedMemory.open(handle.name, handle.shape.num_word_bytes + handle.shape.num_bytes)
        ring = SharedMemoryExchange(handle, memory)
        ring._words.check_generation(handle)
        return ring

    def unlink(self) -> None:
        """See `HiddenStateExchange`."""
        self._memory.unlink()

    def publish(self, features: Tensor, timeout_s: float) -> tuple[int, int]:
        """See `HiddenStateExchange`."""
        self.handle.shape.check_fits(features)
        slot = self._words.wait_free(timeout_s)
        self._rows[slot, : features.shape[0]].copy_(features)
        return slot, self._words.publish(slot)

    def take(self, slot: int, sequence: int, num_rows: int) -> Tensor:
        """See `HiddenStateExchange`."""
        self._words.check_published(slot, sequence)
        features = self._rows[slot, :num_rows].clone()
        self._words.release(slot, sequence)
        return features
