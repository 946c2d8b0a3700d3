"""The one thing a model asks of whoever runs it: attention over a cache the model knows nothing about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer's attention departs from plain softmax over all visible keys.

    Args:
        scale: multiplies the logits; None is `D ** -0.5`.
        window: a query at position p sees keys at positions p - window + 1 … p only; None sees all.
        softcap: logits become `softcap * tanh(logits / softcap)`, after the scale.
        sinks: one extra logit per query head that takes part in the softmax and has no value, `[Hq]`.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN_ATTENTION = AttentionOptions()


class Attention(Protocol):
    """Stores a layer's new keys and values, then attends.

    Args:
        layer: index of the calling layer within its model.
        query: `[T, Hq, D]`, rotated.
        key: `[T, Hkv, D]`, rotated; rows belong to the same T tokens.
        value: `[T, Hkv, Dv]`.

    Returns:
        `[T, Hq, Dv]`.
    """

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor: ...


def no_attention(
    layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """What a model that keeps no cache is given.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("a model that keeps no cache called attention")
