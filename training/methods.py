"""The kinds of head that can be trained."""

from __future__ import annotations

from typing import Any

from eyas.training.eagle3_method import Eagle3Method
from eyas.training.method import TrainingMethod
from eyas.training.mtp_method import MtpMethod

KINDS = ("eagle3", "mtp")


def training_method(kind: str, aux_layers: tuple[int, ...] | None = None) -> TrainingMethod[Any]:
    """How a kind of head is trained; `aux_layers` is what an EAGLE-3 head fuses.

    Raises:
        ValueError: for a kind that cannot be trained.
    """
    if kind == "eagle3":
        return Eagle3Method(aux_layers)
    if kind == "mtp":
        return MtpMethod()
    raise ValueError(f"kind: {kind} cannot be trained; use one of {KINDS}")
