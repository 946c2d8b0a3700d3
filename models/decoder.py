"""What a runner asks of a target model, whichever implementation is behind it.

Letters: T tokens, H hidden, A captured states, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """Args:
    hidden: after the final norm, what `logits` reads, `[T, H]`.
    features: captured states side by side, `[T, A * H]`, or None if none were asked for.
    """

    hidden: Tensor
    features: Tensor | None


class Decoder(Protocol):
    """A target on one rank, over flat token rows; batches, caches and pages are the `Attention`'s business."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def parallel(self) -> TensorParallel: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the states, keys and values."""
        ...

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, capture: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """Run rows `token_ids [T]` at `positions [T]`.

        Args:
            capture: states to return as features: k is the residual stream after k layers, before the final norm;
                `config.final_index` is the state after that norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[T, H]` to full-vocabulary logits `[T, V]`, joined over ranks."""
        ...
