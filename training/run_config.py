"""What every training run can be told: how long, on which batches, at which rates, and in which precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long to train, on what and how fast.

    Args:
        num_steps: batches to train on; None takes as many as fit into `max_minutes`.
        max_minutes: wall time to plan for when `num_steps` is None, judged by the speed of the first steps.
        tokens_per_batch: rows of a batch.
        max_length: longer conversations are cut to so many rows.
        num_levels: levels to train, level i counting `level_decay ** i`.
        learning_rate: of AdamW.
        warmup_steps: the rates rise linearly over these, then fall along a cosine to `final_rate_share`.
        validation_share: the last conversations of the corpus, not trained on.
        dtype: what is computed in; weights and optimiser are always float32.
    """

    num_steps: int | None = None
    max_minutes: float | None = None
    tokens_per_batch: int = 1000
    max_length: int = 2048
    num_levels: int = 3
    level_decay: float = 0.8
    learning_rate: float = 1.2e-3
    final_rate_share: float = 0.02
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    validation_share: float = 0.02
    checkpoint_minutes: float = 5.0
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.max_minutes is None):
            raise ValueError("num_steps, max_minutes: give exactly one of them")
        self.require_whole("num_steps", "tokens_per_batch", "num_levels")
        for name in ("max_minutes", "learning_rate", "level_decay", "max_grad_norm", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: must be a number above 0, got {value}")
        if self.max_length < 3:
            raise ValueError(f"max_length: must be at least 3, got {self.max_length}")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share: must be between 0 and 1, got {self.validation_share}")
        if not 0 <= self.seed < 2**32:  # it is multiplied and added to where batches and noise are drawn
            raise ValueError(f"seed: must be between 0 and {2**32 - 1}, got {self.seed}")
        self.require_share("final_rate_share")
        self.require_not_negative("warmup_steps")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype} is not supported; use one of {', '.join(DTYPES)}")

    def require_whole(self, *names: str) -> None:
        """Raise `ValueError` for a number below 1; None is left alone."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")

    def require_share(self, *names: str) -> None:
        """Raise `ValueError` for what is not between 0 and 1."""
        for name in names:
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}: must be between 0 and 1, got {value}")

    def require_not_negative(self, *names: str) -> None:
        """Raise `ValueError` for a number below 0 or without end."""
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: must be a number of at least 0, got {value}")

    @property
    def compute_dtype(self) -> torch.dtype:
        """`dtype` as torch calls it."""
        return DTYPES[self.dtype]

    def is_validated_after(self, step: int, num_steps: int | None) -> bool:
        """Whether a validation is due once `step` steps are done; none is, unless a kind of run has them."""
        return False

    def planned_steps(self, left_s: float, step_s: float, validation_s: float) -> int:
        """Steps that fit into a time, their validations counted."""
        return max(0, int(left_s / step_s))

    def rate_share(self, step: int, num_steps: int | None) -> float:
        """Share of the rates a step uses; as long as `num_steps` is unknown it only warms up."""
        warmup = self.warmup_steps if num_steps is None else min(self.warmup_steps, num_steps // 5)
        if step < warmup or num_steps is None:
            return min(1.0, (step + 1) / max(1, warmup))
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_rate_share + (1.0 - self.final_rate_share) * cosine
