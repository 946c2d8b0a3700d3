"""A double of `CudaRuntime` without a GPU: device memory in shared memory of the node, events as counters in it.

It runs everything at once, as a stream with no work does, and refuses what CUDA would let pass or leave undefined:
waiting for an event that was not recorded (again) since, mapping a handle twice or in the process that exported it,
reading past an allocation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eyas.workers.shared_memory import SharedMemory

_EVENT_BYTES = 8


class FakeEvent:
    """Counts its records; `on_record` is called with each, before the other side can see it."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._count = torch.frombuffer(memory.buffer, dtype=torch.int64, count=1)
        self._num_passed = 0
        self.on_record: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None

    def record(self) -> None:
        self.on_record()
        self._count += 1

    def wait(self) -> None:
        self.on_wait()
        count = int(self._count)
        assert count > self._num_passed, "CUDA would not wait: the event was not recorded since the last wait"
        self._num_passed = count

    def ipc_handle(self) -> bytes:
        return self._memory.name.encode()


class FakeCudaRuntime:
    """One process's access to a GPU; two of them in one process stand for two processes."""

    def __init__(self, gpu: str = "GPU-0") -> None:
        self.gpu = gpu
        self._blocks: dict[int, SharedMemory] = {}
        self._sizes: dict[int, int] = {}
        self._exported: set[bytes] = set()
        self._opened: set[bytes] = set()
        self._owned: list[SharedMemory] = []

    def allocate(self, num_bytes: int) -> int:
        memory = SharedMemory.create(num_bytes)
        self._owned.append(memory)
        return self._place(memory, num_bytes)

    def export_memory(self, address: int) -> bytes:
        handle = f"{self._blocks[address].name} {self._sizes[address]}".encode()
        assert handle not in self._exported, "exported twice"
        self._exported.add(handle)
        return handle

    def open_memory(self, handle: bytes) -> int:
        assert handle not in self._opened, "a process may map a handle once"
        assert handle not in self._exported, "a handle cannot be mapped by the process that exported it"
        self._opened.add(handle)
        name, size = handle.decode().split()
        return self._place(SharedMemory.open(name, int(size)), int(size))

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        assert num_bytes <= self._sizes[address]
        return torch.frombuffer(self._blocks[address].buffer, dtype=torch.uint8, count=num_bytes)

    def new_event(self) -> FakeEvent:
        memory = SharedMemory.create(_EVENT_BYTES)
        self._owned.append(memory)
        return FakeEvent(memory)

    def open_event(self, handle: bytes) -> FakeEvent:
        return FakeEvent(SharedMemory.open(handle.decode(), _EVENT_BYTES))

    def end(self) -> None:
        """What the end of the process does: names go, memory goes with the last mapping."""
        for memory in self._owned:
            memory.unlink()

    def _place(self, memory: SharedMemory, num_bytes: int) -> int:
        address = (len(self._blocks) + 1) << 32
        self._blocks[address], self._sizes[address] = memory, num_bytes
        return address
