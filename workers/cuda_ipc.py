"""The few CUDA calls by which two processes share device memory and order their work on it.

Memory comes from cudaMalloc itself, beside torch's caching allocator: an IPC handle stands for a whole allocation and
maps it from its base, which for a tensor of the caching allocator is not where the tensor begins. Events are torch's.
Nothing here is ever freed: an exporter must outlive its importers, so memory goes with the processes.

`CudaRuntime` is all that an exchange asks of CUDA; tests put a double in its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_UNSHARABLE = {
    "expandable_segments:true": "whose segments cannot be shared between processes in an unprivileged container",
    "backend:cudamallocasync": "whose memory has no IPC handles",
}
# CUDA cuts smaller allocations from shared blocks, and a handle then gives away the whole block.
_ALLOCATION_BYTES = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1


class InterprocessEvent(Protocol):
    """A point in one process's stream that a stream of another process can wait for."""

    def record(self) -> object:
        """Mark the end of what the current stream holds."""

    def wait(self) -> object:
        """Let the current stream, not the caller, wait for the newest mark; an event without one is passed at once."""

    def ipc_handle(self) -> bytes: ...


class CudaRuntime(Protocol):
    """One process's access to its GPU."""

    @property
    def gpu(self) -> str:
        """UUID of the physical GPU."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Device memory of its own; returns its address."""
        ...

    def export_memory(self, address: int) -> bytes:
        """The IPC handle of allocated memory."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map another process's memory; returns its address here. Once per handle and process."""
        ...

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """The memory itself as uint8 `[num_bytes]`; valid as long as the memory is."""
        ...

    def new_event(self) -> InterprocessEvent: ...

    def open_event(self, handle: bytes) -> InterprocessEvent: ...


class TorchCudaRuntime:
    """`CudaRuntime` through torch and the CUDA runtime library that torch itself uses."""

    def __init__(self, device: torch.device) -> None:
        """Raises `RuntimeError` if this process has no CUDA."""
        torch.cuda.init()
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._library = _open_library()

    @property
    def gpu(self) -> str:
        return gpu_uuid(self._device)

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        rounded = -(-num_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(rounded))
        return _value(address)

    def export_memory(self, address: int) -> bytes:
        handle = _MemoryHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        self._call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(address),
            _MemoryHandle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return _value(address)

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        tensor = torch.as_tensor(_DeviceBytes(address, num_bytes), device=self._device)
        if tensor.data_ptr() != address:
            raise RuntimeError("torch copied device memory that it should have wrapped")
        return tensor

    def new_event(self) -> InterprocessEvent:
        return torch.cuda.Event(interprocess=True)

    def open_event(self, handle: bytes) -> InterprocessEvent:
        event: InterprocessEvent = torch.cuda.Event.from_ipc_handle(self._device, handle)
        return event

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            status = getattr(self._library, name)(*arguments)
        if status:
            reason = self._library.cudaGetErrorString(status).decode()
            raise RuntimeError(f"{name} failed on {self._device}: {reason}")


def gpu_uuid(device: torch.device) -> str:
    """UUID of the physical GPU behind a device, the same in every process whatever it calls the device."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_allocator(environment: Mapping[str, str]) -> None:
    """Refuse settings of torch's allocator under which device memory cannot be shared.

    Raises:
        ValueError: naming the variable and the remedy.
    """
    for variable in _ALLOCATOR_VARIABLES:
        for option in environment.get(variable, "").split(","):
            reason = _UNSHARABLE.get(option.replace(" ", "").lower())
            if reason is not None:
                raise ValueError(
                    f"{variable}: {option.strip()} selects an allocator {reason}, as target and drafter need it; "
                    "remove the option: weights, pools and rings are allocated once and do not fragment"
                )


class _MemoryHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _DeviceBytes:
    """Device memory as torch imports it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _open_library() -> Any:
    version = torch.version.cuda
    if version is None:
        raise RuntimeError("this torch was built without CUDA")
    library: Any = ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")  # torch has loaded it: found by its name
    library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _MemoryHandle, ctypes.c_uint]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _value(address: ctypes.c_void_p) -> int:
    if address.value is None:
        raise RuntimeError("CUDA returned no address")
    return address.value
