"""The one thing a model asks of whoever runs it: attention over a cache the model knows nothing about."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Stores a layer's new keys and values, then attends.

    Args:
        layer: index of the calling layer within its model.
        query: `[T, Hq, D]`, rotated.
        key, value: `[T, Hkv, D]`, key rotated; rows belong to the same T tokens.

    Returns:
        `[T, Hq, D]`.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...
