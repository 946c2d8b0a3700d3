"""How a draft head is trained, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.training.objective_options import LOSS_ROWS, OBJECTIVES, ObjectiveOptions
from eyas.training.run_config import RunConfig
from eyas.training.validation import WIDTH

_VALIDATIONS = 20


@dataclass(frozen=True, slots=True)
class TrainingConfig(RunConfig):
    """How to train; further arguments are those of `RunConfig`.

    Args:
        kind: of head: eagle3, eagle, medusa or mtp. Its levels are steps of the training-time test, or the heads of
            Medusa.
        num_layers: decoder layers of an EAGLE-3 head.
        draft_vocab_size: target ids an EAGLE-3 head can propose, the most frequent ones of the answers.
        loss_vocab_size: those the loss of every batch is taken over, the most frequent ones, too.
        num_sampled: ids of the others that stand for them in the loss of a batch, see `Objective`.
        has_own_projection: of Medusa, see `MedusaMethod`.
        objective, tree_width, tree_share, loss_rows, feature_noise: see `ObjectiveOptions`.
        matrix_rate, matrix_decay: see `HeadOptimizer`.
        validation_levels: levels to validate, where the head can draft so many.
        validate_every: steps between validations; None takes a twentieth of the run.
        patience: validations without a new best one after which training ends; 0 is never.
    """

    kind: str
    num_layers: int = 1
    draft_vocab_size: int = 8192
    loss_vocab_size: int = 3072
    num_sampled: int = 2048
    has_own_projection: bool = False
    objective: str = "distill"
    tree_width: int = 4
    tree_share: float = 0.5
    loss_rows: str = "all"
    feature_noise: float = 0.0
    matrix_rate: float = 1e-2
    matrix_decay: float = 0.1
    validation_levels: int = 5
    validate_every: int | None = None
    patience: int = 0

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)  # super() does not find its class in one with slots
        self.require_whole(
            "num_layers", "draft_vocab_size", "loss_vocab_size", "tree_width", "validation_levels", "validate_every"
        )
        if self.kind == "eagle3" and self.draft_vocab_size < WIDTH:
            raise ValueError(
                f"draft_vocab_size: must be at least {WIDTH}, the candidates of a node, got {self.draft_vocab_size}"
            )
        num_ids = min(self.draft_vocab_size, self.loss_vocab_size)
        if self.objective == "tree" and self.tree_width >= num_ids:
            raise ValueError(f"tree_width: must be below the {num_ids} ids of the loss, got {self.tree_width}")
        self.require_share("tree_share")
        self.require_not_negative("matrix_rate", "matrix_decay", "num_sampled", "feature_noise", "patience")
        for name, known in (("objective", OBJECTIVES), ("loss_rows", LOSS_ROWS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}: {value} is not supported; use one of {', '.join(known)}")

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
