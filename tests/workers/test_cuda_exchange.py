"""The exchange in device memory: order of copies and events, refusals, two processes over a double and over CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch
from fake_cuda import FakeCudaRuntime, FakeEvent
from torch import Tensor

from eyas.workers.cuda_exchange import CudaExchange, CudaRingHandle
from eyas.workers.cuda_ipc import CudaRuntime, TorchCudaRuntime
from eyas.workers.ring import RingShape

SHAPE = RingShape.of(2, 4, 8, torch.bfloat16)
NUM_LAPS = 9
BUSY_CYCLES = 100_000_000  # some 50 ms of a GPU: the other side overtakes it unless it waits for events
TIMEOUT_S = 60.0


class Pair:
    """Both sides of a ring on the double, with their events."""

    def __init__(self, shape: RingShape = SHAPE) -> None:
        self.runtimes = FakeCudaRuntime(), FakeCudaRuntime()
        self.producer = CudaExchange.create(shape, self.runtimes[0])
        self.consumer = CudaExchange.attach(ring_handle(self.producer), self.runtimes[1])

    def events(self, name: str) -> list[FakeEvent]:
        """`published` or `released` of both sides, which are objects of their own as in two processes."""
        sides = (self.producer, self.consumer)
        return [event for side in sides for event in getattr(side, f"_{name}") if isinstance(event, FakeEvent)]


def ring_handle(ring: CudaExchange) -> CudaRingHandle:
    assert isinstance(ring.handle, CudaRingHandle)
    return ring.handle


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.producer.unlink()
    for runtime in made.runtimes:
        runtime.end()


def rows_of(step: int, device: torch.device | None = None) -> Tensor:
    """Rows that tell their step, `[4, 8]`; whole numbers, exact in bfloat16."""
    return (torch.arange(32, device=device).view(4, 8) % 7 + step).bfloat16()


def test_each_copy_lies_between_its_wait_and_its_record(pair: Pair) -> None:
    """An event recorded too early, or waited for too late: the GPU of the other side then copies other rows."""
    seen: list[tuple[str, float]] = []

    def note(name: str, slot: int) -> None:
        seen.append((name, float(pair.producer._rows[slot, 0, 0])))

    for index, event in enumerate(pair.events("published")):
        event.on_record = lambda slot=index % 2: note("published recorded", slot)
        event.on_wait = lambda slot=index % 2: note("published passed", slot)
    for index, event in enumerate(pair.events("released")):

        def overwrite(slot: int = index % 2) -> None:
            note("released recorded", slot)
            pair.producer._rows[slot] = -1.0  # from here on the producer's GPU may

        event.on_record = overwrite
        event.on_wait = lambda slot=index % 2: note("released passed", slot)
    for step in range(4):
        slot, sequence = pair.producer.publish(rows_of(step), 1.0)
        assert torch.equal(pair.consumer.take(slot, sequence, 4), rows_of(step))
    by_step = [
        [("published recorded", step), ("published passed", step), ("released recorded", step)] for step in range(4)
    ]
    for step in (2, 3):  # the first lap finds slots that nobody ever used
        by_step[step].insert(0, ("released passed", -1.0))
    assert seen == [entry for step in by_step for entry in step]


def test_another_gpu_is_refused(pair: Pair) -> None:
    """A mapping over another GPU: slow where peers can see each other, an obscure CUDA error where they cannot."""
    with pytest.raises(RuntimeError, match="on GPU GPU-0, but the drafter was given GPU-1; both must share one GPU"):
        CudaExchange.attach(ring_handle(pair.producer), FakeCudaRuntime("GPU-1"))


def test_memory_that_is_not_the_ring_is_refused(pair: Pair) -> None:
    """Features read at a wrong offset of an allocation that the ring does not begin."""
    other = Pair()
    handle = msgspec.structs.replace(ring_handle(pair.producer), memory=ring_handle(other.producer).memory)
    with pytest.raises(RuntimeError, match="not the ring that was exported"):
        CudaExchange.attach(handle, FakeCudaRuntime())
    other.producer.unlink()
    for runtime in other.runtimes:
        runtime.end()


def test_only_words_lie_in_host_memory(pair: Pair) -> None:
    """A small /dev/shm, as in a container, stopping an engine whose rows never go there."""
    assert pair.producer._memory.buffer.size() == (1 + 2 * SHAPE.num_slots) * 8


def consume(kind: str, connection: Connection) -> None:
    """The drafter's process: attach, take every lap with all slots full, and say whether the rows were right."""
    runtime, device = new_runtime(kind)
    ring = CudaExchange.attach(connection.recv(), runtime)
    connection.send("attached")
    are_equal: list[Tensor] = []
    for lap in range(NUM_LAPS):
        slots = connection.recv()
        if lap % 3 == 1:
            keep_busy(device)  # the copies out are queued behind this: the slots are released late on the GPU
        for index, (slot, sequence) in enumerate(slots):
            taken = ring.take(slot, sequence, 4)
            are_equal.append((taken == rows_of(SHAPE.num_slots * lap + index, device)).all())
        connection.send("taken")
    connection.send([bool(each) for each in are_equal])


def produce(kind: str) -> list[bool]:
    """The target's process, this one; returns what the other one found."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=consume, args=(kind, theirs))
    process.start()
    theirs.close()
    runtime, device = new_runtime(kind)
    ring = CudaExchange.create(SHAPE, runtime)

    def answer() -> object:
        assert connection.poll(TIMEOUT_S), "the other process stayed silent"
        return connection.recv()

    try:
        connection.send(ring.handle)
        assert answer() == "attached"
        ring.unlink()
        for lap in range(NUM_LAPS):
            if lap % 3 == 0:
                keep_busy(device)  # the copies in are queued behind this: the slots are published late on the GPU
            steps = range(SHAPE.num_slots * lap, SHAPE.num_slots * (lap + 1))
            connection.send([ring.publish(rows_of(step, device), TIMEOUT_S) for step in steps])
            assert answer() == "taken"
        found = answer()
        assert isinstance(found, list)
        return found
    finally:
        process.join(TIMEOUT_S)
        if isinstance(runtime, FakeCudaRuntime):
            runtime.end()


def new_runtime(kind: str) -> tuple[CudaRuntime, torch.device]:
    if kind == "fake":
        return FakeCudaRuntime(), torch.device("cpu")
    device = torch.device("cuda", 0)
    return TorchCudaRuntime(device), device


def keep_busy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def test_two_processes() -> None:
    """What only one address space holds together: pointers in the handle, events that are the same object."""
    assert produce("fake") == [True] * SHAPE.num_slots * NUM_LAPS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_on_a_gpu() -> None:
    """Slots read before they are written or overwritten before they are read, by GPUs that run behind their hosts."""
    assert produce("cuda") == [True] * SHAPE.num_slots * NUM_LAPS
