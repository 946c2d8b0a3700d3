"""What a published head is, before any of it is loaded: kind, format, flat config, tensors under one set of names.

Every published format is one function from a path to `HeadFiles`; the kinds (eagle3, eagle, medusa, mtp) know only the
fields and names given here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.models.checkpoint import TensorSource


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as found.

    Args:
        kind: eagle3, eagle, medusa or mtp.
        format: how its files are laid out, for people.
        path: folder or file.
        config: flat fields in the kind's own terms.
        tensors: under the kind's own names.
    """

    kind: str
    format: str
    path: Path
    config: dict[str, Any]
    tensors: TensorSource


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
