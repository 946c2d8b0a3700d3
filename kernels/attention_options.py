"""How a layer's attention may depart from plain softmax over all visible keys."""

from __future__ import annotations

from dataclasses import dataclass

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
