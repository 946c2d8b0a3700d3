"""Parity of rotation and KV write with `kernels.fused.rotate_and_store`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import fused, triton_rope

# float32: products may be fused into the sum. Half types round once more, which may fall the other way.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
POISON = 77.0  # in slots that no token owns

Check = Callable[[], None]
CASES: list[ParityCase] = []


def regime(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES.append(ParityCase("rope", "triton", name, check))
        return check

    return add


def random_rotation(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both halves of the table differ, as no table's do, so that neither can stand for the other."""
    angles = 10.0 * torch.randn(tokens, 1, head_dim, generator=torch.Generator().manual_seed(3))
    return angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)


def random_qkv(tokens: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(heads)).to(dtype).to(DEVICE)


def pool(num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys and values of two layers, `[2, 2, S, Hkv, D]`."""
    return torch.full((2, 2, num_slots, num_kv_heads, head_dim), POISON, dtype=dtype, device=DEVICE)


def agree(qkv: Tensor, slots: list[int], num_heads: int, cache: Tensor, layer: int = 1) -> None:
    """`cache` is a `pool`, of whatever strides; all of it is compared, so what nobody owns must be left alone."""
    rotation = random_rotation(qkv.shape[0], qkv.shape[2], qkv.dtype)
    places = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    expected_cache, before = cache.clone(), qkv.clone()
    expected = fused.rotate_and_store(before, rotation, places, *expected_cache[:, layer], num_heads)
    query = triton_rope.rotate_and_store(qkv, rotation, places, *cache[:, layer], num_heads)
    tolerance = TOLERANCE[qkv.dtype]
    torch.testing.assert_close(query, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(cache[0], expected_cache[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(cache[1], expected_cache[1], rtol=0.0, atol=0.0, equal_nan=True)


@regime("head dims")
def check_head_dims() -> None:
    """Catches halves that are no power of two, and one half rotated by the other's angles or sign."""
    for head_dim in (2, 64, 80, 96, 128, 256):
        agree(random_qkv(3, 8, head_dim), [4, 0, 9], 4, pool(10, 2, head_dim))


@regime("half types")
def check_half_types() -> None:
    """Catches values that are rounded on their way, and the cosine's product left unrounded."""
    for dtype in (torch.bfloat16, torch.float16):
        agree(random_qkv(5, 12, 64, dtype), [7, 3, 1, 0, 6], 8, pool(8, 2, 64, dtype))


@regime("grouped heads")
def check_grouped_heads() -> None:
    """Catches kinds of heads told apart wrongly: where they meet within a program, and past the last head."""
    for num_heads, num_kv_heads in ((1, 1), (8, 8), (9, 3), (32, 8), (5, 1), (6, 1)):
        agree(random_qkv(2, num_heads + 2 * num_kv_heads, 64), [2, 1], num_heads, pool(4, num_kv_heads, 64))


@regime("page boundaries")
def check_page_boundaries() -> None:
    """Catches slots that are computed instead of read: scattered pages, the pool's first slot and its last."""
    slots = [63, 0, 16, 15, 32, 47, 1, 48, 62]
    agree(random_qkv(len(slots), 8, 64), slots, 4, pool(64, 2, 64))


@regime("one token")
def check_one_token() -> None:
    """Catches grids made for many tokens."""
    agree(random_qkv(1, 4, 64), [1], 2, pool(2, 1, 64))


@regime("no tokens")
def check_no_tokens() -> None:
    """Catches a launch of nothing."""
    agree(random_qkv(0, 4, 64), [], 2, pool(2, 1, 64))


@regime("views")
def check_views() -> None:
    """Catches tokens, slots or heads found without their strides: part of a wider product, and a pool by heads."""
    wide = random_qkv(4, 11, 64)
    agree(wide[:, :8], [3, 5, 0, 1], 4, pool(6, 2, 64))
    by_heads = torch.full((2, 2, 2, 6, 64), POISON, device=DEVICE).transpose(2, 3)  # [2, 2, S, Hkv, D]
    assert not by_heads[0, 0].is_contiguous()
    agree(random_qkv(4, 8, 64), [3, 5, 0, 1], 4, by_heads)


@regime("not finite")
def check_not_finite() -> None:
    """Catches a fault of one token or head that reaches others, and values lost to it."""
    qkv = random_qkv(3, 8, 64)
    qkv[0, 0, 5], qkv[1, 4, 7], qkv[2, 7, 9] = math.nan, math.inf, math.nan
    with np.errstate(invalid="ignore"):
        agree(qkv, [2, 0, 3], 4, pool(5, 2, 64))
