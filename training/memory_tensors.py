"""A published head that is not in files yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.head_files import HeadFiles
from eyas.models.tensor_source import StoredTensors


class MemoryTensors(StoredTensors):
    """Tensors in memory; what is read are copies."""

    def __init__(self, tensors: dict[str, Tensor], origin: Path) -> None:
        super().__init__(origin)
        self._tensors = tensors
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._num_bytes = {name: tensor.nbytes for name, tensor in tensors.items()}

    def _fetch(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._tensors[name].to(dtype, copy=True)


def memory_files(kind: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> HeadFiles:
    """A head of this content."""
    origin = Path(f"new {kind} head")
    return HeadFiles(kind, origin.name, origin, config, MemoryTensors(tensors, origin))
