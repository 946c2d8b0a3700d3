"""The exchange of engines on a GPU: slots in device memory that target rank 0 allocates and the drafter maps.

Nothing is copied to the host and nobody waits there for the GPU. Two events per slot order the streams of the two
processes: *published*, recorded behind the copy in and waited for before the copy out, and *released*, recorded behind
the copy out and waited for before the next copy in. An event that was never recorded counts as passed, and so does one
that has not been recorded *again*; therefore the ring's words, written after each record, tell either side that the
other has recorded, before it waits.

Letters: R rows, F features of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.workers.cuda_ipc import CudaRuntime, InterprocessEvent
from eyas.workers.ring import RingHandle, RingShape, RingWords, new_generation
from eyas.workers.shared_memory import SharedMemory

_MARK_BYTES = 8


class CudaRingHandle(RingHandle, frozen=True):
    """Args:
    gpu: UUID of the GPU that holds the slots.
    memory: IPC handle of the slots, which begin at its base.
    published, released: IPC handles of the events of each slot.
    """

    gpu: str
    memory: bytes
    published: list[bytes]
    released: list[bytes]


class CudaExchange:
    """One side of the ring; see `HiddenStateExchange`. Its memory lasts as long as the process that created it."""

    def __init__(
        self,
        handle: CudaRingHandle,
        memory: SharedMemory,
        slots: Tensor,
        published: list[InterprocessEvent],
        released: list[InterprocessEvent],
    ) -> None:
        """Args:
        slots: the device memory, uint8: all slots, then the generation as a mark.
        """
        shape = handle.shape
        self.handle: RingHandle = handle
        self._memory = memory
        self._words = RingWords(memory, shape)
        self._rows = slots[: shape.num_bytes].view(shape.torch_dtype)
        self._rows = self._rows.view(shape.num_slots, shape.max_rows, shape.row_size)
        self._published = published
        self._released = released

    @staticmethod
    def create(shape: RingShape, runtime: CudaRuntime) -> CudaExchange:
        """Allocate a ring and export it."""
        memory = SharedMemory.create(shape.num_word_bytes)
        address = runtime.allocate(_num_device_bytes(shape))
        published = [runtime.new_event() for _ in range(shape.num_slots)]
        released = [runtime.new_event() for _ in range(shape.num_slots)]
        handle = CudaRingHandle(
            name=memory.name,
            generation=new_generation(),
            shape=shape,
            gpu=runtime.gpu,
            memory=runtime.export_memory(address),
            published=[event.ipc_handle() for event in published],
            released=[event.ipc_handle() for event in released],
        )
        slots = runtime.bytes_at(address, _num_device_bytes(shape))
        _mark(slots).copy_(torch.tensor([handle.generation]))
        ring = CudaExchange(handle, memory, slots, published, released)
        ring._words.begin(handle.generation)
        return ring

    @staticmethod
    def attach(handle: CudaRingHandle, runtime: CudaRuntime) -> CudaExchange:
        """Map a peer's ring.

        Raises:
            RuntimeError: if it is not on this node or not on this GPU, belongs to another run, or was not mapped as
                it was exported.
        """
        if runtime.gpu != handle.gpu:
            raise RuntimeError(
                f"target rank 0 publishes hidden states on GPU {handle.gpu}, but the drafter was given {runtime.gpu}; "
                "both must share one GPU: check the placement group and CUDA_VISIBLE_DEVICES"
            )
        memory = SharedMemory.open(handle.name, handle.shape.num_word_bytes)
        RingWords(memory, handle.shape).check_generation(handle)
        slots = runtime.bytes_at(runtime.open_memory(handle.memory), _num_device_bytes(handle.shape))
        if int(_mark(slots)) != handle.generation:
            raise RuntimeError(f"the device memory behind {handle.name} is not the ring that was exported")
        published = [runtime.open_event(event) for event in handle.published]
        released = [runtime.open_event(event) for event in handle.released]
        return CudaExchange(handle, memory, slots, published, released)

    def unlink(self) -> None:
        """See `HiddenStateExchange`."""
        self._memory.unlink()

    def publish(self, features: Tensor, timeout_s: float) -> tuple[int, int]:
        """See `HiddenStateExchange`; the copy runs on the current stream."""
        self.handle.shape.check_fits(features)
        slot = self._words.wait_free(timeout_s)
        if not self._words.is_first_lap:
            self._released[slot].wait()
        self._rows[slot, : features.shape[0]].copy_(features, non_blocking=True)
        self._published[slot].record()
        return slot, self._words.publish(slot)

    def take(self, slot: int, sequence: int, num_rows: int) -> Tensor:
        """See `HiddenStateExchange`; the copy runs on the current stream."""
        self._words.check_published(slot, sequence)
        self._published[slot].wait()
        features = self._rows[slot, :num_rows].clone()
        self._released[slot].record()
        self._words.release(slot, sequence)
        return features


def _num_device_bytes(shape: RingShape) -> int:
    return _mark_offset(shape) + _MARK_BYTES


def _mark_offset(shape: RingShape) -> int:
    return -(-shape.num_bytes // _MARK_BYTES) * _MARK_BYTES


def _mark(slots: Tensor) -> Tensor:
    """The generation at the end of the device memory, int64 `[1]`."""
    return slots[-_MARK_BYTES:].view(torch.int64)
