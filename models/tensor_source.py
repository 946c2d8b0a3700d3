"""Named tensors, wherever they are: what every published format and every head is read through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Named tensors, read when asked for; `origin` names the files in errors."""

    origin: Path

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def num_bytes(self, name: str) -> int: ...

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class StoredTensors(ABC):
    """A source that knows the shape and the size of everything it holds; how a tensor is fetched is its own.

    Args:
        origin: names the files in errors.
    """

    def __init__(self, origin: Path) -> None:
        self.origin = origin
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._num_bytes: dict[str, int] = {}

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
        return self._fetch(name, dtype)

    @abstractmethod
    def _fetch(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor that exists, as `dtype`."""


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
        """See `StoredTensors.read`; errors carry the name in the file."""
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
