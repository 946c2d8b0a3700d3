"""Reading tensors from published files: safetensors, and pickled `.bin` / `.pt` without running what is in them."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.models.config import read_json

_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
         "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}  # fmt: skip
_LFS_POINTER = b"version https://git-lfs"


class TensorSource(Protocol):
    """Named tensors, read when asked for; `origin` names the files in errors."""

    origin: Path

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int: ...

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class Checkpoint:
    """Lazy view of the tensors in a file or in a folder's weight files; safetensors win over pickles.

    Raises:
        ValueError: naming the folder or file, when there is none or one is damaged or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.origin = path
        self._name_to_file: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._num_bytes: dict[str, int] = {}
        for file in [path] if path.is_file() else _weight_files(path):
            if file.suffix == ".safetensors":
                self._open_safetensors(file)
            else:
                self._pickled |= _load_pickled(file)
        self._shapes |= {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}
        self._num_bytes |= {name: tensor.nbytes for name, tensor in self._pickled.items()}

    def _open_safetensors(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    self._name_to_file[name] = file
                    view = opened.get_slice(name)
                    self._shapes[name] = tuple(view.get_shape())
                    self._num_bytes[name] = math.prod(view.get_shape()) * _BITS[view.get_dtype()] // 8
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {lfs_hint(file) or error}") from None

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that exists."""
        return self._shapes[name]

    def num_bytes(self, name: str) -> int:
        """Size of a tensor as stored."""
        return self._num_bytes[name]

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Tensor `name` as `dtype`; its shape must be `shape`.

        Raises:
            ValueError: naming tensor, expected and found shape, or saying that it is missing.
        """
        if name not in self._shapes:
            raise ValueError(f"{self.origin}: tensor {name} is missing")
        if self._shapes[name] != shape:
            raise ValueError(f"{self.origin}: tensor {name} is {list(self._shapes[name])}, expected {list(shape)}")
        if name in self._pickled:
            return self._pickled[name].to(dtype)
        with safe_open(self._name_to_file[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor.to(dtype)

    def read_optional(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """`read`, or None when the checkpoint has no such tensor."""
        return self.read(name, shape, dtype) if name in self else None


class Renamed:
    """A source under other names: `names` maps each new name to the one in the source."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.origin = source.origin
        self._source = source
        self._names = dict(names)

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def num_bytes(self, name: str) -> int:
        return self._source.num_bytes(self._names[name])

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Checkpoint.read`; errors carry the name in the file."""
        return self._source.read(self._names.get(name, name), shape, dtype)


def read_tensors(source: TensorSource, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """All of `shapes`, floating-point ones checked to be finite.

    Raises:
        ValueError: naming the tensor that is missing, misshapen, or holds NaN or infinity.
    """
    tensors = {name: source.read(name, shape, dtype) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{source.origin}: tensor {name} holds NaN or infinity")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        index = folder / {"*.safetensors": "model.safetensors", "*.bin": "pytorch_model.bin"}.get(pattern, "?")
        index = index.with_name(index.name + ".index.json")
        if index.exists():
            files = [folder / str(name) for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
            missing = [file for file in files if not file.exists()]
            if missing:
                raise ValueError(f"{missing[0]} is named by {index.name} but does not exist")
            return files
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"{folder} holds no .safetensors, .bin or .pt file")


def _load_pickled(file: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        code = "it holds objects other than tensors, which would run code; convert it to safetensors"
        raise ValueError(f"{file} is not loaded: {lfs_hint(file) or code}") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{file} cannot be read: {lfs_hint(file) or first_line}") from None
    except (AssertionError, AttributeError, LookupError, TypeError, struct.error):  # as torch meets changed bytes
        raise ValueError(f"{file} cannot be read: it is damaged; copy it again") from None
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{file} must hold a dictionary of tensors")
    return {str(name): tensor for name, tensor in content.items()}


def lfs_hint(file: Path) -> str | None:
    """What to say of a file that Git LFS left as a pointer; None for any other."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return None
    return "it is a Git LFS pointer, not the weights; run `git lfs pull`" if is_pointer else None
