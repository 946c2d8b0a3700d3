"""The CUDA calls behind the exchange, over a library that is not there: arguments, errors, refused allocators."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from eyas.workers.cuda_ipc import TorchCudaRuntime, check_allocator

BASE = 0x7F00_0000_0000
HANDLE = bytes(range(64))


class FakeLibrary:
    """libcudart as ctypes passes arguments to it."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.opened = b""
        self.status = 0

    def cudaMalloc(self, address: Any, num_bytes: ctypes.c_size_t) -> int:
        address._obj.value = BASE
        self.allocated_bytes = num_bytes.value
        return self.status

    def cudaIpcGetMemHandle(self, handle: Any, address: ctypes.c_void_p) -> int:
        assert address.value == BASE
        ctypes.memmove(ctypes.addressof(handle._obj), HANDLE, 64)
        return self.status

    def cudaIpcOpenMemHandle(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        self.opened = bytes(handle)
        assert flags.value == 1
        address._obj.value = BASE + 1
        return self.status

    def cudaGetErrorString(self, status: int) -> bytes:
        return f"error {status}".encode()


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def runtime(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> TorchCudaRuntime:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("eyas.workers.cuda_ipc._open_library", lambda: library)
    return TorchCudaRuntime(torch.device("cuda", 0))


def test_handles_pass_unchanged(runtime: TorchCudaRuntime, library: FakeLibrary) -> None:
    """A handle cut at its first zero byte, as a C string is."""
    address = runtime.allocate(100)
    assert address == BASE
    assert runtime.export_memory(address) == HANDLE
    assert runtime.open_memory(HANDLE) == BASE + 1
    assert library.opened == HANDLE


@pytest.mark.parametrize(("asked", "taken"), [(1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)])
def test_a_ring_shares_no_block(runtime: TorchCudaRuntime, library: FakeLibrary, asked: int, taken: int) -> None:
    """A small allocation inside a block of others: its handle would map the block, from the block's base."""
    runtime.allocate(asked)
    assert library.allocated_bytes == taken


def test_failures_name_the_call(runtime: TorchCudaRuntime, library: FakeLibrary) -> None:
    """An address of nothing used as memory."""
    library.status = 2
    with pytest.raises(RuntimeError, match="cudaMalloc failed on cuda:0: error 2"):
        runtime.allocate(1)


def test_without_cuda_it_is_said() -> None:
    """A crash inside ctypes where torch has no CUDA."""
    if torch.version.cuda is None:
        with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
            TorchCudaRuntime(torch.device("cuda"))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "option"),
    [
        ("expandable_segments:True", "expandable_segments:True"),
        ("max_split_size_mb:64, expandable_segments:True", "expandable_segments:True"),
        ("backend:cudaMallocAsync,max_split_size_mb:64", "backend:cudaMallocAsync"),
    ],
)
def test_allocators_that_cannot_share_are_refused(variable: str, value: str, option: str) -> None:
    """`pidfd_getfd: Operation not permitted` from the depths of the first step."""
    with pytest.raises(ValueError, match=f"{variable}: {option} .*; remove the option"):
        check_allocator({variable: value})


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "backend:native,max_split_size_mb:64"])
def test_other_allocator_settings_pass(value: str) -> None:
    """A server that refuses what would have worked."""
    check_allocator({"PYTORCH_CUDA_ALLOC_CONF": value})
