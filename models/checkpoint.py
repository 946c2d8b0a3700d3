"""Reading tensors from published files: safetensors, and pickled `.bin` / `.pt` without running what is in them."""

from __future__ import annotations

import math
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.models.config import read_json
from eyas.models.tensor_source import StoredTensors

_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
         "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}  # fmt: skip
# What a folder's weights are called, and the index of those in several files.
_WEIGHT_FILES = (
    ("*.safetensors", "model.safetensors.index.json"),
    ("*.bin", "pytorch_model.bin.index.json"),
    ("*.pt", "pytorch_model.pt.index.json"),
)
_LFS_POINTER = b"version https://git-lfs"


class Checkpoint(StoredTensors):
    """Lazy view of the tensors in a file or in a folder's weight files; safetensors win over pickles.

    Raises:
        ValueError: naming the folder or file, when there is none or one is damaged or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._name_to_file: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
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
                    if view.get_dtype() not in _BITS:
                        raise ValueError(
                            f"{file}: tensor {name} is stored as {view.get_dtype()}, which is not supported; convert "
                            "it to bfloat16 or float32"
                        )
                    self._num_bytes[name] = math.prod(view.get_shape()) * _BITS[view.get_dtype()] // 8
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {lfs_hint(file) or error}") from None

    def _fetch(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._pickled:
            return self._pickled[name].to(dtype)
        with safe_open(self._name_to_file[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor.to(dtype)

    def read_optional(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """`read`, or None when the checkpoint has no such tensor."""
        return self.read(name, shape, dtype) if name in self else None


def _weight_files(folder: Path) -> list[Path]:
    for pattern, index_name in _WEIGHT_FILES:
        index = folder / index_name
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
