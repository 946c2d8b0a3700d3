"""Reading tensors from Hugging Face safetensors folders."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.models.config import read_json


class Checkpoint:
    """Lazy view of the tensors in a folder's `*.safetensors` files; tensors are read when asked for.

    Raises:
        ValueError: naming the folder or file, when there is none or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name_to_file: dict[str, Path] = {}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = set(read_json(index).get("weight_map", {}).values())
            files = [folder / str(name) for name in sorted(names)]
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} holds no .safetensors file")
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    self._name_to_file.update(dict.fromkeys(opened.keys(), file))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read as safetensors: {error}") from None

    @property
    def names(self) -> list[str]:
        return list(self._name_to_file)

    def __contains__(self, name: str) -> bool:
        return name in self._name_to_file

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Tensor `name` as `dtype`; its shape must be `shape`.

        Raises:
            ValueError: naming tensor, expected and found shape, or saying that it is missing.
        """
        file = self._name_to_file.get(name)
        if file is None:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.folder}: tensor {name} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor.to(dtype)

    def read_optional(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """`read`, or None when the checkpoint has no such tensor."""
        return self.read(name, shape, dtype) if name in self else None
