"""Named memory that the processes of one node share: POSIX shared memory, created, opened, unlinked, swept.

It knows nothing of what lies in it. A name tells the process that created it, so that memory whose owner was killed
before it could unlink the name is found and removed at the next start.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PREFIX = "eyas-"


class SharedMemory:
    """One process's mapping of a named block of memory; it lasts as long as this object or a tensor over it."""

    def __init__(self, name: str, buffer: mmap.mmap) -> None:
        self.name = name
        self.buffer = buffer

    @staticmethod
    def create(num_bytes: int) -> SharedMemory:
        """A new block of zeros; sweeps those whose owner died.

        Raises:
            RuntimeError: if the node has no room for it.
        """
        sweep_stale()
        name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        descriptor = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Takes the memory now: a block that outgrows /dev/shm would kill its writer with SIGBUS later.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return SharedMemory(name, mmap.mmap(descriptor, num_bytes))
        except OSError as error:
            (_FOLDER / name).unlink()
            raise RuntimeError(
                f"{_FOLDER} has no room for the {num_bytes >> 20} MiB of an exchange ring ({error.strerror}); enlarge "
                "it, in a container with --shm-size or a memory-backed volume, or lower max_batch_size and "
                "max_prefill_tokens"
            ) from error
        finally:
            os.close(descriptor)

    @staticmethod
    def open(name: str, num_bytes: int) -> SharedMemory:
        """The block another process of this node created.

        Raises:
            RuntimeError: if this node has no such block.
        """
        try:
            descriptor = os.open(_FOLDER / name, os.O_RDWR)
        except FileNotFoundError:
            raise RuntimeError(
                f"{_FOLDER / name} does not exist: target rank 0 and the drafter must run on one node and see the "
                "same /dev/shm, and attach before rank 0 unlinks the name"
            ) from None
        try:
            return SharedMemory(name, mmap.mmap(descriptor, num_bytes))
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Remove the name, once all peers have opened it: nothing is left behind however the processes end."""
        with contextlib.suppress(FileNotFoundError):
            (_FOLDER / self.name).unlink()


def sweep_stale() -> None:
    """Unlink blocks whose owning process no longer exists (a kill leaves them behind before peers have opened them)."""
    for file in _FOLDER.glob(f"{_PREFIX}*"):
        owner = file.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(FileNotFoundError, PermissionError):
                file.unlink()
