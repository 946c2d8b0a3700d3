"""How a draft head is trained, whatever its kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from eyas.training.objective_options import LOSS_ROWS, OBJECTIVES, ObjectiveOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_VALIDATIONS = 20


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How to train.

    Args:
        kind: of head: eagle3, eagle, medusa or mtp.
        num_steps: batches to train on; None takes as many as fit into `max_minutes`.
        max_minutes: wall time to plan for when `num_steps` is None, judged by the speed of the first steps.
        draft_vocab_size: target ids the loss is taken over, the most frequent ones of the answers; an EAGLE-3 head can
            propose no others.
        num_sampled: ids of the others that stand for them in the loss of a batch, see `Objective`.
        tokens_per_batch: rows of a batch.
        num_levels: levels to train, level i counting `level_decay ** i`: steps of the training-time test, or the heads
            of Medusa.
        has_own_projection: of Medusa, see `MedusaMethod`.
        objective, tree_width, tree_share, loss_rows, feature_noise: see `ObjectiveOptions`.
        learning_rate, matrix_rate, matrix_decay: see `HeadOptimizer`.
        warmup_steps: the rates rise linearly over these, then fall along a cosine to `final_rate_share`.
        validation_share: the last conversations of the corpus, not trained on.
        validation_levels: levels to validate, where the head can draft so many.
        validate_every: steps between validations; None takes a twentieth of the run.
        patience: validations without a new best one after which training ends; 0 is never.
        dtype: what is computed in; weights and optimiser are always float32.
    """

    kind: str
    num_steps: int | None = None
    max_minutes: float | None = None
    draft_vocab_size: int = 8192
    num_sampled: int = 2048
    tokens_per_batch: int = 3000
    max_length: int = 2048
    num_levels: int = 3
    level_decay: float = 0.8
    has_own_projection: bool = False
    objective: str = "distill"
    tree_width: int = 4
    tree_share: float = 0.5
    loss_rows: str = "answers"
    feature_noise: float = 0.0
    learning_rate: float = 1.2e-3
    matrix_rate: float = 1e-2
    matrix_decay: float = 0.1
    final_rate_share: float = 0.02
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    validation_share: float = 0.02
    validation_levels: int = 5
    validate_every: int | None = None
    patience: int = 0
    checkpoint_minutes: float = 5.0
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.max_minutes is None):
            raise ValueError("num_steps, max_minutes: give exactly one of them")
        for name in (
            "num_steps",
            "draft_vocab_size",
            "tokens_per_batch",
            "num_levels",
            "tree_width",
            "validation_levels",
            "validate_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        for name in ("max_minutes", "learning_rate", "level_decay", "max_grad_norm", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: must be above 0, got {value}")
        if self.max_length < 3:
            raise ValueError(f"max_length: must be at least 3, got {self.max_length}")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share: must be between 0 and 1, got {self.validation_share}")
        for name in ("final_rate_share", "tree_share"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}: must be between 0 and 1, got {value}")
        for name in ("warmup_steps", "matrix_rate", "matrix_decay", "num_sampled", "feature_noise", "patience"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: must not be negative, got {value}")
        for name, known in (("objective", OBJECTIVES), ("loss_rows", LOSS_ROWS), ("dtype", DTYPES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}: {value} is not supported; use one of {', '.join(known)}")

    @property
    def compute_dtype(self) -> torch.dtype:
        """`dtype` as torch calls it."""
        return DTYPES[self.dtype]

    @property
    def objective_options(self) -> ObjectiveOptions:
        """What of this says how to compare."""
        return ObjectiveOptions(
            self.objective, self.tree_width, self.tree_share, self.loss_rows, self.feature_noise, self.seed
        )

    def is_validated_after(self, step: int, num_steps: int | None) -> bool:
        """Whether the head is validated once `step` steps are done, the last one aside; not while planning."""
        if num_steps is None:
            return False
        return step % (self.validate_every or max(1, num_steps // _VALIDATIONS)) == 0

    def planned_steps(self, left_s: float, step_s: float, validation_s: float) -> int:
        """Steps that fit into a time, their validations counted."""
        if self.validate_every is None:
            return max(0, int((left_s - _VALIDATIONS * validation_s) / step_s))
        return max(0, int(left_s / (step_s + validation_s / self.validate_every)))

    def rate_share(self, step: int, num_steps: int | None) -> float:
        """Share of the rates a step uses; as long as `num_steps` is unknown it only warms up."""
        warmup = self.warmup_steps if num_steps is None else min(self.warmup_steps, num_steps // 5)
        if step < warmup or num_steps is None:
            return min(1.0, (step + 1) / max(1, warmup))
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_rate_share + (1.0 - self.final_rate_share) * cosine
