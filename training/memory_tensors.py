"""A published head that is not in files yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.head_files import HeadFiles


class MemoryTensors:
    """A `TensorSource` in memory."""

    def __init__(self, tensors: dict[str, Tensor], origin: Path) -> None:
        self.origin = origin
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return tuple(self._tensors[name].shape)

    def num_bytes(self, name: str) -> int:
        """See `TensorSource.num_bytes`."""
        return self._tensors[name].nbytes

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A copy; see `Checkpoint.read`."""
        if name not in self._tensors or self.shape(name) != shape:
            raise ValueError(f"{self.origin}: a new head needs tensor {name} {list(shape)}")
        return self._tensors[name].to(dtype, copy=True)


def memory_files(kind: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> HeadFiles:
    """A head of this content."""
    origin = Path(f"new {kind} head")
    return HeadFiles(kind, origin.name, origin, config, MemoryTensors(tensors, origin))
