"""What a published head is, before any of it is loaded: kind, format, flat config, tensors under one set of names.

Every published format is one function from a path to `HeadFiles`; the kinds (eagle3, eagle, medusa, mtp) know only the
fields and names given here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.models.config import DecoderConfig
from eyas.models.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as found.

    Args:
        kind: eagle3, eagle, medusa or mtp.
        format: how its files are laid out, for people.
        path: folder or file.
        config: flat fields in the kind's own terms.
        tensors: under the kind's own names.
        base: sizes of the only target it may be loaded for, see `base_of`; None if the files name none.
    """

    kind: str
    format: str
    path: Path
    config: dict[str, Any]
    tensors: TensorSource
    base: dict[str, int] | None = None

    def check_base(self, target: DecoderConfig) -> None:
        """Raise `ValueError`, naming the sizes that differ, if the files name another target."""
        own = base_of(target)
        if self.base is not None and self.base != own:
            differing = [name for name in own if self.base[name] != own[name]]
            found = ", ".join(f"{name} is {own[name]}, expected {self.base[name]}" for name in differing)
            raise ValueError(f"{self.path}: the head was made for another target: {found}; serve it with its own")


def base_of(target: DecoderConfig) -> dict[str, int]:
    """Sizes that tell one target from another, as a `.heads` file names them."""
    return {
        "layers": target.num_layers,
        "d_model": target.hidden_size,
        "heads": target.num_heads,
        "ctx": target.max_positions,
        "vocab": target.vocab_size,
    }


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What the user may say that a head's files do not, or say wrongly.

    Args:
        aux_layers: residual-stream indices to read instead of those the files name.
        token_map: file with the target ids a head without a vocabulary of its own may propose (FR-Spec).
        num_candidates: rows that a low-rank candidate projection retrieves for exact scoring.
    """

    aux_layers: tuple[int, ...] | None = None
    token_map: str | None = None
    num_candidates: int | None = None
