"""What every exchange ring has: its shape, and the words by which its two sides hand slots to each other.

The words lie in shared memory of the node, wherever the slots themselves are: per slot the sequence number published
last and the one released last. A slot is free when both are equal, so neither side can overtake the other by a lap,
whatever the order of messages. A generation number, new with every ring, keeps a restarted peer from reading a ring of
the run before.

Letters: R rows, F features of a row.
"""

from __future__ import annotations

import time
import uuid

import msgspec
import torch
from torch import Tensor

from eyas.workers.shared_memory import SharedMemory

_WORD_BYTES = 8
_POLL_S = 50e-6


class RingShape(msgspec.Struct, frozen=True):
    """`num_slots` slots of `[max_rows, row_size]` items.

    Args:
        dtype: name of the torch dtype, as in `bfloat16`.
    """

    num_slots: int
    max_rows: int
    row_size: int
    dtype: str

    @staticmethod
    def of(num_slots: int, max_rows: int, row_size: int, dtype: torch.dtype) -> RingShape:
        return RingShape(num_slots, max_rows, row_size, str(dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.max_rows * self.row_size * self.torch_dtype.itemsize

    @property
    def num_word_bytes(self) -> int:
        """Of the words that go with the slots."""
        return (1 + 2 * self.num_slots) * _WORD_BYTES

    def check_fits(self, features: Tensor) -> None:
        """Raise `ValueError` unless `features [R, F]` fits a slot."""
        if features.shape[0] > self.max_rows or features.shape[1] != self.row_size:
            raise ValueError(f"features {list(features.shape)} do not fit a slot of {[self.max_rows, self.row_size]}")


class RingHandle(msgspec.Struct, frozen=True):
    """What a peer needs to attach; travels once, at start-up.

    Args:
        name: of the shared memory that holds the words.
    """

    name: str
    generation: int
    shape: RingShape


def new_generation() -> int:
    """A number no other ring has, and that fits a signed 64-bit word."""
    return uuid.uuid4().int & (1 << 62) - 1


class RingWords:
    """One side's view of the words: generation, then (published, released) per slot."""

    def __init__(self, memory: SharedMemory, shape: RingShape) -> None:
        self._num_slots = shape.num_slots
        self._words = torch.frombuffer(memory.buffer, dtype=torch.int64, count=shape.num_word_bytes // _WORD_BYTES)
        self._sequence = 0

    def begin(self, generation: int) -> None:
        """Producer: make the ring this generation's, all slots free."""
        self._words.zero_()
        self._words[0] = generation

    def check_generation(self, handle: RingHandle) -> None:
        """Raise `RuntimeError` if the memory belongs to another ring than the handle."""
        if int(self._words[0]) != handle.generation:
            raise RuntimeError(f"shared memory {handle.name} belongs to another run")

    def wait_free(self, timeout_s: float) -> int:
        """Producer: the next slot, once the consumer has released what it held.

        Raises:
            TimeoutError: if that does not happen in time.
        """
        slot = self._sequence % self._num_slots
        deadline = time.monotonic() + timeout_s
        while int(self._words[2 + 2 * slot]) != int(self._words[1 + 2 * slot]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the drafter did not release exchange slot {slot} within {timeout_s} s")
            time.sleep(_POLL_S)
        return slot

    @property
    def is_first_lap(self) -> bool:
        """Producer: whether the next slot was never used."""
        return self._sequence < self._num_slots

    def publish(self, slot: int) -> int:
        """Producer: give the slot to the consumer; returns its sequence number."""
        self._sequence += 1
        self._words[1 + 2 * slot] = self._sequence
        return self._sequence

    def check_published(self, slot: int, sequence: int) -> None:
        """Consumer: raise `RuntimeError` if the slot holds another step's rows."""
        published = int(self._words[1 + 2 * slot])
        if published != sequence:
            raise RuntimeError(f"exchange slot {slot} holds sequence {published}, not {sequence}")

    def release(self, slot: int, sequence: int) -> None:
        """Consumer: give the slot back."""
        self._words[2 + 2 * slot] = sequence
