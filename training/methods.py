"""The kinds of head that can be trained."""

from __future__ import annotations

from typing import Any

from eyas.training.eagle3_method import Eagle3Method
from eyas.training.eagle_method import EagleMethod
from eyas.training.medusa_method import MedusaMethod
from eyas.training.method import TrainingMethod
from eyas.training.mtp_method import MtpMethod
from eyas.training.training_config import TrainingConfig

KINDS = ("medusa", "eagle", "eagle3", "mtp")


def training_method(config: TrainingConfig, aux_layers: tuple[int, ...] | None = None) -> TrainingMethod[Any]:
    """How the kind of head is trained that `config` names; `aux_layers` is what an EAGLE-3 head fuses.

    Raises:
        ValueError: for a kind that cannot be trained.
    """
    if config.kind == "medusa":
        return MedusaMethod(config.has_own_projection)
    if config.kind == "eagle":
        return EagleMethod()
    if config.kind == "eagle3":
        return Eagle3Method(aux_layers, config.num_layers)
    if config.kind == "mtp":
        return MtpMethod()
    raise ValueError(f"kind: {config.kind} cannot be trained; use one of {KINDS}")
