"""The one thing a model asks of whoever runs it: attention over a cache the model knows nothing about."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions


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
