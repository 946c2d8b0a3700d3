"""HiddenStateExchange: what holds wherever the slots lie, the choice by device, and shared memory that is left over."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from fake_cuda import FakeCudaRuntime

from eyas.workers import exchange
from eyas.workers.cuda_exchange import CudaExchange
from eyas.workers.exchange import HiddenStateExchange, attach_exchange, create_exchange
from eyas.workers.ring import RingShape
from eyas.workers.shared_memory import sweep_stale
from eyas.workers.shared_memory_exchange import SharedMemoryExchange

SHM = Path("/dev/shm")
CPU = torch.device("cpu")
ONE_ITEM = RingShape(1, 1, 1, "float32")
TWO_SLOTS = RingShape(2, 5, 3, "float32")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Each kind of device in turn; CUDA is a double, each of whose runtimes stands for a process."""
    runtimes: list[FakeCudaRuntime] = []

    def new_runtime(device: torch.device) -> FakeCudaRuntime:
        runtimes.append(FakeCudaRuntime())
        return runtimes[-1]

    monkeypatch.setattr(exchange, "TorchCudaRuntime", new_runtime)
    yield torch.device(request.param)
    for runtime in runtimes:
        runtime.end()


def ring_pair(device: torch.device, shape: RingShape = TWO_SLOTS) -> tuple[HiddenStateExchange, HiddenStateExchange]:
    producer = create_exchange(shape, device)
    consumer = attach_exchange(producer.handle, device)
    producer.unlink()
    return producer, consumer


def test_the_device_decides_where_the_slots_lie(device: torch.device) -> None:
    """Hidden states that take the way over the host although both sides share a GPU."""
    kind = {"cpu": SharedMemoryExchange, "cuda": CudaExchange}[device.type]
    assert [type(side) for side in ring_pair(device)] == [kind, kind]


def test_rows_arrive_unchanged_over_many_laps(device: torch.device) -> None:
    """A slot index or offset that is wrong after the first lap of the ring."""
    producer, consumer = ring_pair(device)
    for step in range(7):
        rows = torch.randn(1 + step % 5, 3)
        slot, sequence = producer.publish(rows, timeout_s=1.0)
        assert (slot, sequence) == (step % 2, step + 1)
        assert torch.equal(consumer.take(slot, sequence, rows.shape[0]), rows)


def test_all_slots_can_be_full_at_once(device: torch.device) -> None:
    """Slots that overlap, which one row at a time never shows."""
    producer, consumer = ring_pair(device, RingShape.of(4, 3, 5, torch.bfloat16))
    for _ in range(3):
        written = [torch.randn(3, 5).bfloat16() for _ in range(4)]
        published = [producer.publish(rows, 1.0) for rows in written]
        for rows, (slot, sequence) in zip(written, published, strict=True):
            assert torch.equal(consumer.take(slot, sequence, 3), rows)


def test_bfloat16_and_zero_rows(device: torch.device) -> None:
    """Another item size shifts the data; a step that commits nothing must still pass."""
    producer, consumer = ring_pair(device, RingShape.of(3, 3, 3, torch.bfloat16))  # 54 bytes: the mark is padded to
    rows = torch.randn(3, 3).bfloat16()
    slot, sequence = producer.publish(rows, 1.0)
    assert torch.equal(consumer.take(slot, sequence, 3), rows)
    slot, sequence = producer.publish(rows[:0], 1.0)
    assert consumer.take(slot, sequence, 0).shape == (0, 3)


def test_taken_rows_are_the_takers_own(device: torch.device) -> None:
    """Features that change under the drafter when the slot is used again."""
    producer, consumer = ring_pair(device, RingShape(1, 1, 3, "float32"))
    taken = consumer.take(*producer.publish(torch.ones(1, 3), 1.0), 1)
    producer.publish(torch.zeros(1, 3), 1.0)
    assert torch.equal(taken, torch.ones(1, 3))


def test_a_full_ring_makes_the_producer_wait_and_then_fail(device: torch.device) -> None:
    """Overwriting a slot the drafter has not read mixes two steps' features silently."""
    producer, consumer = ring_pair(device)
    first = producer.publish(torch.ones(1, 3), 1.0)
    producer.publish(torch.ones(1, 3), 1.0)
    with pytest.raises(TimeoutError, match="slot 0"):
        producer.publish(torch.ones(1, 3), 0.01)
    consumer.take(*first, 1)
    assert producer.publish(torch.ones(1, 3), 1.0)[0] == 0


def test_a_stale_sequence_is_refused(device: torch.device) -> None:
    """Reading a slot that already holds a later step's rows."""
    producer, consumer = ring_pair(device, RingShape(1, 5, 3, "float32"))
    slot, sequence = producer.publish(torch.ones(1, 3), 1.0)
    consumer.take(slot, sequence, 1)
    producer.publish(torch.zeros(1, 3), 1.0)
    with pytest.raises(RuntimeError, match="holds sequence 2, not 1"):
        consumer.take(slot, sequence, 1)


@pytest.mark.parametrize("shape", [(6, 3), (1, 4)])
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, int], device: torch.device) -> None:
    """Rows running over into the next slot."""
    producer, _ = ring_pair(device)
    with pytest.raises(ValueError, match="do not fit"):
        producer.publish(torch.ones(shape), 1.0)


def test_another_generation_is_refused(device: torch.device) -> None:
    """A restarted peer attaching to a ring of the run before."""
    producer = create_exchange(ONE_ITEM, device)
    stale = msgspec.structs.replace(producer.handle, generation=producer.handle.generation + 1)
    with pytest.raises(RuntimeError, match="another run"):
        attach_exchange(stale, device)
    producer.unlink()


def test_a_ring_of_another_node_is_refused(device: torch.device) -> None:
    """A bare FileNotFoundError when the placement put the drafter on another node."""
    producer = create_exchange(ONE_ITEM, device)
    producer.unlink()
    with pytest.raises(RuntimeError, match="must run on one node"):
        attach_exchange(producer.handle, device)


def test_unlinked_rings_leave_nothing_behind(device: torch.device) -> None:
    """Leaked shared memory fills the machine's memory."""
    producer, _ = ring_pair(device)
    assert not (SHM / producer.handle.name).exists()


def test_handles_survive_the_way_to_another_process(device: torch.device) -> None:
    """A handle that loses its kind or its bytes in a message."""
    producer = create_exchange(ONE_ITEM, device)
    handle = pickle.loads(pickle.dumps(producer.handle))
    assert handle == producer.handle
    assert type(handle) is type(producer.handle)
    producer.unlink()


def _create_and_die(name_queue: multiprocessing.Queue[str]) -> None:
    producer = create_exchange(ONE_ITEM, CPU)
    name_queue.put(producer.handle.name)


def test_stale_rings_of_dead_owners_are_swept_and_living_ones_kept() -> None:
    """A kill before peers have attached leaves the name behind; sweeping must not hit a running engine."""
    context = multiprocessing.get_context("spawn")
    names = context.Queue()
    process = context.Process(target=_create_and_die, args=(names,))
    process.start()
    stale = names.get(timeout=60)
    process.join(timeout=60)
    living = create_exchange(ONE_ITEM, CPU)
    sweep_stale()
    assert not (SHM / stale).exists()
    assert (SHM / living.handle.name).exists()
    assert living.handle.name.split("-")[1] == str(os.getpid())
    living.unlink()


def test_a_ring_without_room_is_refused_and_leaves_nothing() -> None:
    """A writer killed by SIGBUS in mid-service where /dev/shm is small, as in a container."""
    memory = os.statvfs("/dev/shm")
    num_rows = memory.f_frsize * memory.f_blocks // 1024 + 1
    before = set(SHM.glob("eyas-*"))
    with pytest.raises(RuntimeError, match="no room for the .* MiB of an exchange ring"):
        create_exchange(RingShape(1, num_rows, 256, "float32"), CPU)
    assert set(SHM.glob("eyas-*")) == before
