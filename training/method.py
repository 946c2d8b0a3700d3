"""What the trainer must know of a kind of draft head: how it begins, what it reads, what of it is compared.

Methods hold no weights: the trainer computes with copies of a head's weights in another dtype.

Letters: T rows, R bases, A fused layers, H target hidden, F features of a position, S width of a head's state, Vd
tokens a head can propose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from eyas.models.head import DraftHead
from eyas.training.batch import Batch
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.ttt import training_time_test

Head = TypeVar("Head", bound=DraftHead)


class TrainingMethod(ABC, Generic[Head]):
    """One kind of head in training.

    Args:
        cross_entropy_share: what the cross-entropy counts next to `state_loss`.
        has_draft_vocabulary: whether a head proposes only some of the target's ids.
    """

    cross_entropy_share: float = 1.0
    has_draft_vocabulary: bool = False

    @abstractmethod
    def new_head(self, weights: NewWeights, token_ids: Tensor, num_levels: int) -> Head:
        """A trainable float32 head, shared tensors frozen and in the dtype to compute in.

        Args:
            token_ids: of a draft vocabulary, for a kind that has one; strictly increasing, int64.
        """

    def inputs(self, states: Tensor, output: TargetOutput) -> Tensor:
        """What the head reads, `[T, F]`, of the recorded states `[T, (A + 1) * H]`: the one after the final norm."""
        return output.normed(states[:, -output.norm.shape[0] :])

    def level_states(self, head: Head, inputs: Tensor, batch: Batch, num_levels: int) -> list[Tensor]:
        """The head's states at every base of every level: `num_levels` tensors `[R_k, S]`."""
        return training_time_test(head, inputs, batch, num_levels)

    @abstractmethod
    def projected(self, head: Head, states: Tensor, level: int) -> Tensor:
        """What the output projection reads at a level, the first being 0: states `[R, S]` to `[R, H]`."""

    def projection(self, head: Head, level: int) -> Tensor:
        """Output projection of a level, `[Vd, H]`, frozen where it is the target's."""
        weight: Tensor = cast(Any, head).output.weight
        return weight

    def state_loss(self, states: Tensor, following: Tensor) -> Tensor | None:
        """Further loss, a scalar, of a level's states `[R, S]`; `following [R, F]` are the inputs of the rows after."""
        return None

    @abstractmethod
    def export(self, head: Head, folder: Path) -> None:
        """Write the head in a published layout that `load_head` reads."""
