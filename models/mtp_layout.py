"""How a family names its MTP modules, and the tensors of one module under names that all families share.

A module is `enorm`, `hnorm` and `eh_proj` (DeepSeek's names for the norms of embedding and hidden state and for the
projection of both), a decoder layer `block.*`, a final `norm`, and in some files copies of the target's embedding and
output projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.models.tensor_source import TensorSource, read_tensors

GLUE = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight")
SHARED_COPIES = ("embed_tokens.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How one family names its modules and wires them.

    Args:
        format: for people.
        known_by: pattern of a tensor that only an MTP module has; its group is the module's index.
        prefix: of every tensor of a module, `{}` standing for the index.
        block: what follows the prefix in the decoder layer's tensors.
        names: what follows it in the others, to the names used here.
        hidden_first: `eh_proj` reads [hidden, embedding], not [embedding, hidden].
        masks_first: the embedding of the pair at position 0 is zero.
        feeds_back_norm: the state that stands in for a target feature at drafted tokens is taken after `norm`.
    """

    format: str
    known_by: str
    prefix: str
    block: str
    names: dict[str, str]
    hidden_first: bool
    masks_first: bool
    feeds_back_norm: bool


class MtpTensors:
    """One module's tensors out of a checkpoint; errors carry the names in the file.

    Args:
        index: of the module, as the layout counts.
    """

    def __init__(self, source: TensorSource, layout: MtpLayout, index: int) -> None:
        self.origin = source.origin
        self._source = source
        self._prefix = layout.prefix.format(index)
        self._block = layout.block.format(index)
        self._own_names = {name: own for own, name in layout.names.items()}
        self._names = [
            self._name_of(name.removeprefix(self._prefix), layout)
            for name in source.names
            if name.startswith(self._prefix) and _index_of(name, layout) in (None, index)
        ]

    def _name_of(self, own: str, layout: MtpLayout) -> str:
        if own in layout.names:
            return layout.names[own]
        return f"block.{own.removeprefix(self._block)}" if own.startswith(self._block) else own

    @property
    def names(self) -> list[str]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def file_name(self, name: str) -> str:
        """What the file calls a tensor."""
        if name.startswith("block."):
            return self._prefix + self._block + name.removeprefix("block.")
        return self._prefix + self._own_names.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self.file_name(name))

    def num_bytes(self, name: str) -> int:
        return self._source.num_bytes(self.file_name(name))

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Checkpoint.read`."""
        return self._source.read(self.file_name(name), shape, dtype)

    def read_all(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
        """See `read_tensors`."""
        in_file = read_tensors(self._source, {self.file_name(name): shape for name, shape in shapes.items()}, dtype)
        return dict(zip(shapes, in_file.values(), strict=True))


def module_indices(names: Iterable[str], layout: MtpLayout) -> list[int]:
    found = {_index_of(name, layout, unnumbered=0) for name in names}
    return sorted(index for index in found if index is not None)


def _index_of(name: str, layout: MtpLayout, unnumbered: int | None = None) -> int | None:
    """Index of the module that a tensor shows to exist; `unnumbered` if it is one that all modules share."""
    match = re.match(layout.known_by, name)
    if match is None:
        return None
    return unnumbered if match[1] is None else int(match[1])
