"""The weights that validated best so far, and whether it is time to stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from eyas.models.whole_files import save_whole
from eyas.training.validation import Validation


class BestHead:
    """Which validation was the best, by the tokens per verify step of a tree, then of a chain; of equal ones the last.

    Args:
        patience: validations without a better one after which to stop; 0 is never.
    """

    def __init__(self, patience: int = 0) -> None:
        self.patience = patience
        self.validation: Validation | None = None
        self.step = 0
        self.last_step = 0
        self.num_since = 0

    def observe(self, step: int, validation: Validation) -> bool:
        """Take note of a validation after `step` steps; whether none was better."""
        reached = _lengths(validation)
        best = (0.0, 0.0) if self.validation is None else _lengths(self.validation)
        self.last_step = step
        self.num_since = 0 if reached > best else self.num_since + 1
        if reached < best:
            return False
        self.validation, self.step = validation, step
        return True

    @property
    def should_stop(self) -> bool:
        """Whether patience has run out."""
        return 0 < self.patience <= self.num_since

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs to go on exactly."""
        return {
            "validation": None if self.validation is None else asdict(self.validation),
            "step": self.step,
            "last_step": self.last_step,
            "num_since": self.num_since,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave."""
        self.validation = None if state["validation"] is None else Validation(**state["validation"])
        self.step, self.last_step, self.num_since = state["step"], state["last_step"], state["num_since"]


def _lengths(validation: Validation) -> tuple[float, float]:
    return validation.tree_length, validation.chain_length


def save_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors; the file appears complete or not at all."""
    save_whole({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, file)


def load_weights(head: nn.Module, file: Path) -> None:
    """Read into a head what `save_weights` wrote of it; its other weights stay.

    Raises:
        ValueError: if the file has been removed.
    """
    if not file.exists():
        raise ValueError(f"{file}: the best head of this run is gone; train again in another work folder")
    head.load_state_dict(load_file(file), strict=False)
