"""The one thing a model asks of whoever runs it: attention over a cache the model knows nothing about.

Letters: T tokens, Hq / Hkv query / key-value heads, D head dim, Dv head dim of the values.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.fused import rotate


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


class RotatingAttention(Attention, Protocol):
    """An `Attention` that can also rotate, so that rotation and storing are one pass over memory.

    `rotated` gives what `rotate_and_attend` would give by calling the object itself.
    """

    def rotated(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        num_heads: int,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, attend; returns `[T, Hq, D]`.

        Args:
            qkv: `[T, Hq + 2 Hkv, D]`, queries first, then keys, then values; nothing is rotated yet. It may be written
                over.
            rotation: of the T tokens, from `RotaryTable.lookup`; the same object in all layers of a pass.
            num_heads: Hq.
        """
        ...


def rotate_and_attend(
    attention: Attention,
    layer: int,
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    num_heads: int,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> Tensor:
    """Attention from a layer's unrotated projections; the arguments are those of `RotatingAttention.rotated`.

    Objects without `rotated` are given rotated queries and keys.
    """
    fused = getattr(attention, "rotated", None)  # not isinstance: a protocol's costs microseconds in every layer
    if fused is not None:
        attended: Tensor = fused(layer, qkv, rotation, num_heads, options)
        return attended
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    num_rotated = num_heads + num_kv_heads
    query, key = rotate(qkv[:, :num_rotated], rotation).split([num_heads, num_kv_heads], dim=1)
    value = qkv[:, num_rotated:]
    if options is PLAIN_ATTENTION:
        return attention(layer, query, key, value)
    return attention(layer, query, key, value, options)


def no_attention(
    layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """What a model that keeps no cache is given.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("a model that keeps no cache called attention")
