"""HiddenStateExchange over POSIX shared memory: a ring allocated once, through which features go to the drafter.

Target rank 0 writes a step's feature rows into the next slot and names slot and sequence number in its `StepOutcome`;
the drafter copies them out and releases the slot. The control message orders the accesses, so the ring needs no locks.
A generation number keeps a restarted peer from reading a stale ring.

Letters: R rows, F = captured layers * hidden size.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import uuid
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_SHM_FOLDER = Path("/dev/shm")
_PREFIX = "eyas-"
_HEADER_WORDS = 2  # per slot: sequence published, sequence released
_POLL_S = 50e-6


class ExchangeHandle(msgspec.Struct, frozen=True):
    """What a peer needs to attach; travels once, at start-up."""

    name: str
    generation: int
    num_slots: int
    max_rows: int
    row_size: int
    dtype: str


class HiddenStateExchange:
    """One side of the ring. The producer creates it; the consumer attaches; then the producer unlinks its name."""

    def __init__(self, handle: ExchangeHandle, memory: mmap.mmap) -> None:
        self.handle = handle
        self._dtype = getattr(torch, handle.dtype)
        self._memory = memory
        words = handle.num_slots * _HEADER_WORDS + 1
        self._header = torch.frombuffer(memory, dtype=torch.int64, count=words)
        self._rows = torch.frombuffer(
            memory, dtype=self._dtype, count=handle.num_slots * handle.max_rows * handle.row_size, offset=words * 8
        ).view(handle.num_slots, handle.max_rows, handle.row_size)
        self._sequence = 0

    @staticmethod
    def create(num_slots: int, max_rows: int, row_size: int, dtype: torch.dtype) -> HiddenStateExchange:
        """Allocate a ring of `num_slots` slots of `[max_rows, row_size]`; sweeps rings whose owner died."""
        sweep_stale()
        handle = ExchangeHandle(
            name=f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}",
            generation=uuid.uuid4().int & (1 << 62) - 1,
            num_slots=num_slots,
            max_rows=max_rows,
            row_size=row_size,
            dtype=str(dtype).removeprefix("torch."),
        )
        ring = HiddenStateExchange(handle, _map(handle, os.O_CREAT | os.O_EXCL | os.O_RDWR))
        ring._header.zero_()
        ring._header[-1] = handle.generation
        return ring

    @staticmethod
    def attach(handle: ExchangeHandle) -> HiddenStateExchange:
        """Open a peer's ring.

        Raises:
            RuntimeError: if the memory under that name belongs to another run.
        """
        ring = HiddenStateExchange(handle, _map(handle, os.O_RDWR))
        if int(ring._header[-1]) != handle.generation:
            raise RuntimeError(f"shared memory {handle.name} belongs to another run")
        return ring

    def unlink(self) -> None:
        """Remove the name, once all peers have attached: nothing is left behind however the processes end."""
        with contextlib.suppress(FileNotFoundError):
            (_SHM_FOLDER / self.handle.name).unlink()

    def publish(self, features: Tensor, timeout_s: float) -> tuple[int, int]:
        """Copy `features [R, F]` into the next slot; returns (slot, sequence).

        Raises:
            TimeoutError: if the consumer does not release the slot in time.
            ValueError: if the rows do not fit a slot.
        """
        if features.shape[0] > self.handle.max_rows or features.shape[1] != self.handle.row_size:
            raise ValueError(
                f"features {list(features.shape)} do not fit a slot of {[self.handle.max_rows, self.handle.row_size]}"
            )
        slot = self._sequence % self.handle.num_slots
        published, released = self._words(slot)
        deadline = time.monotonic() + timeout_s
        while int(self._header[released]) != int(self._header[published]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the drafter did not release exchange slot {slot} within {timeout_s} s")
            time.sleep(_POLL_S)
        self._sequence += 1
        self._rows[slot, : features.shape[0]].copy_(features)
        self._header[published] = self._sequence
        return slot, self._sequence

    def take(self, slot: int, sequence: int, num_rows: int) -> Tensor:
        """Copy `num_rows` rows out of a published slot and release it.

        Raises:
            RuntimeError: if the slot holds another step's rows.
        """
        published, released = self._words(slot)
        if int(self._header[published]) != sequence:
            raise RuntimeError(f"exchange slot {slot} holds sequence {int(self._header[published])}, not {sequence}")
        features = self._rows[slot, :num_rows].clone()
        self._header[released] = sequence
        return features

    def _words(self, slot: int) -> tuple[int, int]:
        return slot * _HEADER_WORDS, slot * _HEADER_WORDS + 1


def sweep_stale() -> None:
    """Unlink rings whose owning process no longer exists (a kill leaves them behind before peers have attached)."""
    for file in _SHM_FOLDER.glob(f"{_PREFIX}*"):
        owner = file.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(FileNotFoundError, PermissionError):
                file.unlink()


def _map(handle: ExchangeHandle, flags: int) -> mmap.mmap:
    item_bytes = torch.empty(0, dtype=getattr(torch, handle.dtype)).element_size()
    size = (
        handle.num_slots * _HEADER_WORDS + 1
    ) * 8 + handle.num_slots * handle.max_rows * handle.row_size * item_bytes
    path = _SHM_FOLDER / handle.name
    descriptor = os.open(path, flags, 0o600)
    try:
        if flags & os.O_CREAT:
            # Takes the memory now: a ring that outgrows /dev/shm would kill its writer with SIGBUS later.
            os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        if flags & os.O_CREAT:
            path.unlink()
        raise RuntimeError(
            f"{_SHM_FOLDER} has no room for the {size >> 20} MiB of an exchange ring ({error.strerror}); enlarge it, "
            "in a container with --shm-size or a memory-backed volume, or lower max_batch_size and max_prefill_tokens"
        ) from error
    finally:
        os.close(descriptor)
