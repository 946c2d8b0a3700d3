from __future__ import annotations

import subprocess
import sys

import pytest

# Many blocks below the size that the C library maps apart, freed all but the last: the heap cannot shrink by itself.
FRAGMENT = """
import ctypes, os
from eyas.training.heap import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(65536))) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
for block in blocks[:-1]:
    libc.free(block)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_pieces_go_back_to_the_system() -> None:
    """Catches a trim that is never asked for, or asked of another heap."""
    finished = subprocess.run([sys.executable, "-c", FRAGMENT], capture_output=True, text=True, check=True)
    assert int(finished.stdout) > 100e6


# A large block, which the C library by default maps apart and gives back when it is freed.
KEPT = """
import ctypes, os, sys
from eyas.training.heap import keep_freed_memory, return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "keep":
    keep_freed_memory()
before = resident()
block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(100_000_000)))
ctypes.memset(block, 1, 100_000_000)
libc.free(block)
print(resident() - before)
return_freed_memory()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kept", [True, False])
def test_large_blocks_are_kept_until_they_are_returned(kept: bool) -> None:
    """Catches large tensors whose memory is zeroed anew in every step, and memory that is never given back."""
    command = [sys.executable, "-c", KEPT, "keep" if kept else "default"]
    freed, returned = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert (freed > 90e6) is kept
    assert returned < 10e6
