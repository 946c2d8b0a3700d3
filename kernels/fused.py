"""The elementwise work between a model's matrix products, in the three groups that one pass over memory can do.

    residual = x + update,  normed = residual / sqrt(mean(residual ** 2) + eps) * weight
    rotated = head * cos + roll(head, D / 2) * signed_sin,  keys and values to their slots
    silu(gate) * up

Plain torch is the definition and the CPU path. Models get one backend's three functions as a `FusedOperations` and know
nothing else of backends.

Letters: T tokens, H hidden, Hq / Hkv heads, D head dim, S slots, I MLP width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FusedOperations:
    """One backend's functions, with the signatures and meaning of the reference ones in this file."""

    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, Tensor, int], Tensor]
    silu_gate: Callable[[Tensor], Tensor]


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm of `x + update` over the last dimension, and that sum itself; nothing is overwritten.

    Args:
        x: `[T, H]`, or heads `[T, Hq, D]`.
        update: of the same shape; None norms `x` as it is, and `x` is the sum.
        weight: `[H]`, or `[D]`.
    """
    residual = x if update is None else x + update
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads `[T, H, D]` (half-split layout) by cosines and signed sines, `[T, 1, D]` each."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), signed_sin)


def rotate_and_store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
) -> Tensor:
    """Rotate queries and keys, store keys and values, return the queries `[T, Hq, D]`.

    Args:
        qkv: `[T, Hq + 2 Hkv, D]`, queries first, then keys, then values; a backend may write over it.
        rotation: see `rotate`.
        slots: where each token's key and value go, int64 `[T]`, all different; padding rows need slots that nobody
            reads.
        key_cache, value_cache: one layer's pool, `[S, Hkv, D]` each, written in place.
        num_heads: Hq.
    """
    num_rotated = num_heads + key_cache.shape[1]
    rotated = rotate(qkv[:, :num_rotated], rotation)
    key_cache.index_copy_(0, slots, rotated[:, num_heads:])
    value_cache.index_copy_(0, slots, qkv[:, num_rotated:])
    return rotated[:, :num_heads]


def silu_gate(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[T, I]`, of gate and up side by side, `[T, 2 I]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


REFERENCE = FusedOperations(add_rms_norm, rotate_and_store, silu_gate)
