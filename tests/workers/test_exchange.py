"""HiddenStateExchange over POSIX shared memory."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from eyas.workers.exchange import ExchangeHandle, HiddenStateExchange, sweep_stale

SHM = Path("/dev/shm")


def ring_pair(
    num_slots: int = 2, max_rows: int = 5, row_size: int = 3
) -> tuple[HiddenStateExchange, HiddenStateExchange]:
    producer = HiddenStateExchange.create(num_slots, max_rows, row_size, torch.float32)
    consumer = HiddenStateExchange.attach(producer.handle)
    producer.unlink()
    return producer, consumer


def test_rows_arrive_unchanged_over_many_laps() -> None:
    """A slot index or offset that is wrong after the first lap of the ring."""
    producer, consumer = ring_pair()
    for step in range(7):
        rows = torch.randn(1 + step % 5, 3)
        slot, sequence = producer.publish(rows, timeout_s=1.0)
        assert slot == step % 2
        assert torch.equal(consumer.take(slot, sequence, rows.shape[0]), rows)


def test_bfloat16_and_zero_rows() -> None:
    """Another item size shifts the data; a step that commits nothing must still pass."""
    producer = HiddenStateExchange.create(2, 4, 8, torch.bfloat16)
    consumer = HiddenStateExchange.attach(producer.handle)
    producer.unlink()
    rows = torch.randn(4, 8).bfloat16()
    slot, sequence = producer.publish(rows, 1.0)
    assert torch.equal(consumer.take(slot, sequence, 4), rows)
    slot, sequence = producer.publish(rows[:0], 1.0)
    assert consumer.take(slot, sequence, 0).shape == (0, 8)


def test_a_full_ring_makes_the_producer_wait_and_then_fail() -> None:
    """Overwriting a slot the drafter has not read mixes two steps' features silently."""
    producer, consumer = ring_pair()
    first = producer.publish(torch.ones(1, 3), 1.0)
    producer.publish(torch.ones(1, 3), 1.0)
    with pytest.raises(TimeoutError, match="slot 0"):
        producer.publish(torch.ones(1, 3), 0.01)
    consumer.take(*first, 1)
    assert producer.publish(torch.ones(1, 3), 1.0)[0] == 0


def test_a_stale_sequence_is_refused() -> None:
    """Reading a slot that already holds a later step's rows."""
    producer, consumer = ring_pair(num_slots=1)
    slot, sequence = producer.publish(torch.ones(1, 3), 1.0)
    consumer.take(slot, sequence, 1)
    producer.publish(torch.zeros(1, 3), 1.0)
    with pytest.raises(RuntimeError, match="holds sequence 2, not 1"):
        consumer.take(slot, sequence, 1)


@pytest.mark.parametrize("shape", [(6, 3), (1, 4)])
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, int]) -> None:
    """Rows running over into the next slot."""
    producer, _ = ring_pair()
    with pytest.raises(ValueError, match="do not fit"):
        producer.publish(torch.ones(shape), 1.0)


def test_another_generation_is_refused() -> None:
    """A restarted peer attaching to a ring of the run before."""
    producer = HiddenStateExchange.create(1, 1, 1, torch.float32)
    handle = producer.handle
    stale = ExchangeHandle(handle.name, handle.generation + 1, 1, 1, 1, "float32")
    with pytest.raises(RuntimeError, match="another run"):
        HiddenStateExchange.attach(stale)
    producer.unlink()


def test_unlinked_rings_leave_nothing_behind() -> None:
    """Leaked shared memory fills the machine's memory."""
    producer, _ = ring_pair()
    assert not (SHM / producer.handle.name).exists()


def _create_and_die(name_queue: multiprocessing.Queue[str]) -> None:
    producer = HiddenStateExchange.create(1, 1, 1, torch.float32)
    name_queue.put(producer.handle.name)


def test_stale_rings_of_dead_owners_are_swept_and_living_ones_kept() -> None:
    """A kill before peers have attached leaves the name behind; sweeping must not hit a running engine."""
    context = multiprocessing.get_context("spawn")
    names = context.Queue()
    process = context.Process(target=_create_and_die, args=(names,))
    process.start()
    stale = names.get(timeout=60)
    process.join(timeout=60)
    living = HiddenStateExchange.create(1, 1, 1, torch.float32)
    sweep_stale()
    assert not (SHM / stale).exists()
    assert (SHM / living.handle.name).exists()
    assert living.handle.name.split("-")[1] == str(os.getpid())
    living.unlink()


def test_a_ring_without_room_is_refused_and_leaves_nothing() -> None:
    """A writer killed by SIGBUS in mid-service where /dev/shm is small, as in a container."""
    memory = os.statvfs("/dev/shm")
    num_rows = memory.f_frsize * memory.f_blocks // 1024 + 1
    before = set(Path("/dev/shm").glob("eyas-*"))
    with pytest.raises(RuntimeError, match="no room for the .* MiB of an exchange ring"):
        HiddenStateExchange.create(1, num_rows, 256, torch.float32)
    assert set(Path("/dev/shm").glob("eyas-*")) == before
