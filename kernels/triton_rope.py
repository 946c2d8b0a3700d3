# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.fused.rotate_and_store` in Triton: one launch rotates queries and keys and puts keys and values away.

    first half   out = round(first * cos) + second * signed_sin
    second half  out = round(second * cos) + first * signed_sin

in float32, rounded to the tensors' own type at `round` and at the end, as the reference does. A program takes a few
heads of one token, of whatever kind; each goes where its index says.

Letters: T tokens, Hq / Hkv heads, D head dim, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.launch_checks import check_layout

MAX_HEAD_DIM = 256
HEAD_BLOCK = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _store_head(ptr, heads, dims, first, second, is_cell, head_stride, HALF: tl.constexpr):
    cells = ptr + heads * head_stride + dims
    tl.store(cells, first, mask=is_cell)
    tl.store(cells + HALF, second, mask=is_cell)


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    cos_ptr,
    signed_sin_ptr,
    slots_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    qkv_token_stride,
    angle_token_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    num_heads,
    num_kv_heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    dims = tl.arange(0, HALF_BLOCK)[None, :]
    is_dim = dims < HALF
    is_cell = (heads < num_heads + 2 * num_kv_heads) & is_dim
    cells = qkv_ptr + token * qkv_token_stride + heads * (2 * HALF) + dims
    first = tl.load(cells, mask=is_cell, other=0.0)
    second = tl.load(cells + HALF, mask=is_cell, other=0.0)
    angles = token * angle_token_stride + dims
    cos_first = tl.load(cos_ptr + angles, mask=is_dim, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + angles + HALF, mask=is_dim, other=0.0).to(tl.float32)
    sin_first = tl.load(signed_sin_ptr + angles, mask=is_dim, other=0.0).to(tl.float32)
    sin_second = tl.load(signed_sin_ptr + angles + HALF, mask=is_dim, other=0.0).to(tl.float32)
    x, y = first.to(tl.float32), second.to(tl.float32)
    kind = first.dtype
    rotated_first = ((x * cos_first).to(kind).to(tl.float32) + y * sin_first).to(kind)
    rotated_second = ((y * cos_second).to(kind).to(tl.float32) + x * sin_second).to(kind)
    query_ptr += token * num_heads * (2 * HALF)
    _store_head(
        query_ptr, heads, dims, rotated_first, rotated_second, is_cell & (heads < num_heads), 2 * HALF, HALF=HALF
    )
    slot = tl.load(slots_ptr + token)
    key_heads = heads - num_heads
    is_key = is_cell & (key_heads >= 0) & (key_heads < num_kv_heads)
    keys_ptr += slot * key_slot_stride
    _store_head(keys_ptr, key_heads, dims, rotated_first, rotated_second, is_key, key_head_stride, HALF=HALF)
    value_heads = key_heads - num_kv_heads
    values_ptr += slot * value_slot_stride
    _store_head(
        values_ptr, value_heads, dims, first, second, is_cell & (value_heads >= 0), value_head_stride, HALF=HALF
    )


def rotate_and_store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
) -> Tensor:
    """See `kernels.fused.rotate_and_store`.

    Raises:
        ValueError: unless all tensors but the slots have one type (float32, bfloat16 or float16), the heads of a token
            are adjacent, and so are the D elements of a head in the caches; D is even and at most `MAX_HEAD_DIM`.
    """
    cos, signed_sin = rotation
    tokens, num_kv_heads, head_dim = _check_heads(qkv, key_cache, num_heads)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _check_like(name, cache, qkv, (key_cache.shape[0], num_kv_heads, head_dim))
    for name, angles in (("cos", cos), ("signed_sin", signed_sin)):
        _check_like(name, angles, qkv, (tokens, 1, head_dim))
    if cos.stride(0) != signed_sin.stride(0):
        raise ValueError(f"rotation: expected equal strides, got {list(cos.stride())} and {list(signed_sin.stride())}")
    check_layout("slots", slots, (tokens,), torch.int64, qkv.device)
    query = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _rotate_and_store_kernel[(tokens, triton.cdiv(qkv.shape[1], HEAD_BLOCK))](
            qkv, cos, signed_sin, slots, query, key_cache, value_cache,
            qkv.stride(0), cos.stride(0), *key_cache.stride()[:2], *value_cache.stride()[:2], num_heads, num_kv_heads,
            HALF=head_dim // 2, HALF_BLOCK=triton.next_power_of_2(head_dim // 2), HEAD_BLOCK=HEAD_BLOCK,
        )  # fmt: skip
    return query


def _check_heads(qkv: Tensor, key_cache: Tensor, num_heads: int) -> tuple[int, int, int]:
    """T, Hkv and D."""
    if qkv.ndim != 3 or key_cache.ndim != 3 or qkv.dtype not in DTYPES:
        raise ValueError(
            f"qkv: expected float32, bfloat16 or float16 [T, Hq + 2 Hkv, D] and a cache [S, Hkv, D], "
            f"got {qkv.dtype} {list(qkv.shape)} and {list(key_cache.shape)}"
        )
    tokens, all_heads, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[1]
    if all_heads != num_heads + 2 * num_kv_heads:
        raise ValueError(f"qkv: expected {num_heads} + 2 * {num_kv_heads} heads, got {all_heads}")
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"qkv: expected an even head dim of at most {MAX_HEAD_DIM}, got {head_dim}")
    if qkv.stride(2) != 1 or qkv.stride(1) != head_dim:
        raise ValueError(f"qkv: expected the heads of a token to be adjacent, got strides {list(qkv.stride())}")
    return tokens, num_kv_heads, head_dim


def _check_like(name: str, tensor: Tensor, qkv: Tensor, shape: tuple[int, int, int]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != qkv.dtype or tensor.device != qkv.device:
        raise ValueError(
            f"{name}: expected {qkv.dtype} {list(shape)} on {qkv.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if tensor.stride(2) != 1:
        raise ValueError(f"{name}: expected adjacent elements in a head, got strides {list(tensor.stride())}")


def _aot_case(dtype: str, head_dim: int, heads: str = "i32:16") -> AotCase:
    tensors = ("qkv", "cos", "signed_sin", "query", "keys", "values")
    strides = ("qkv_token", "angle_token", "key_slot", "key_head", "value_slot", "value_head")
    return AotCase(
        kernel=_rotate_and_store_kernel,
        signature={f"{name}_ptr": f"*{dtype}" for name in tensors}
        | {"slots_ptr": "*i64"}
        | {f"{name}_stride": "i32:16" for name in strides}
        | {"num_heads": heads, "num_kv_heads": "i32"},
        constexprs={
            "HALF": head_dim // 2,
            "HALF_BLOCK": triton.next_power_of_2(head_dim // 2),
            "HEAD_BLOCK": HEAD_BLOCK,
        },
        label=f"{dtype} D={head_dim} Hq {heads}",
    )


AOT = [
    *(_aot_case("bf16", head_dim) for head_dim in (64, 80, 96, 128, 256)),
    _aot_case("bf16", 64, heads="i32"),
    *(_aot_case("fp16", head_dim) for head_dim in (64, 128)),
    *(_aot_case("fp32", head_dim) for head_dim in (64, 80, 128, 256)),
]
