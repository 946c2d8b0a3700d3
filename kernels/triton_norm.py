# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.fused.add_rms_norm` in Triton: one pass adds, norms and writes both results.

    residual = round(x + update),  normed = round(residual * rsqrt(mean(residual ** 2) + eps) * weight)

in float32, rounded to the tensors' own type where `round` stands. A program holds one whole row, or several short
ones, in registers.

Letters: T tokens, G heads of a token, H width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.launch_checks import check_layout

MAX_WIDTH = 16384
TILE = 1024  # elements a program takes on at least, in whole rows
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    update_ptr,
    weight_ptr,
    normed_ptr,
    residual_ptr,
    x_token_stride,
    x_head_stride,
    update_token_stride,
    update_head_stride,
    num_rows,
    heads,
    width,
    eps,
    HAS_UPDATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    is_cell = (rows < num_rows)[:, None] & (columns < width)
    token, head = rows // heads, rows % heads
    cells = rows[:, None] * width + columns
    x_cells = (token * x_token_stride + head * x_head_stride)[:, None] + columns
    x = tl.load(x_ptr + x_cells, mask=is_cell, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        update_cells = (token * update_token_stride + head * update_head_stride)[:, None] + columns
        x += tl.load(update_ptr + update_cells, mask=is_cell, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + cells, rounded, mask=is_cell)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(normed_ptr + cells, (x * scale[:, None] * weight).to(normed_ptr.dtype.element_ty), mask=is_cell)


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.add_rms_norm`.

    Raises:
        ValueError: unless all tensors have one type (float32, bfloat16 or float16), rows of at most `MAX_WIDTH`
            adjacent elements, and the shape of `x`, `[T, H]` or `[T, G, H]`.
    """
    if x.ndim not in (2, 3) or x.dtype not in DTYPES:
        raise ValueError(f"x: expected float32, bfloat16 or float16 [T, H] or [T, G, H], got {x.dtype} {list(x.shape)}")
    width = x.shape[-1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"x: expected rows of 1 to {MAX_WIDTH} elements, got {width}")
    check_layout("weight", weight, (width,), x.dtype, x.device)
    if update is not None and (update.shape, update.dtype, update.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"update: expected {x.dtype} {list(x.shape)} on {x.device}, "
            f"got {update.dtype} {list(update.shape)} on {update.device}"
        )
    x_strides = _row_strides("x", x)
    update_strides = x_strides if update is None else _row_strides("update", update)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual = x if update is None else torch.empty_like(normed)
    num_rows = x.numel() // width
    if num_rows:
        rows, block, num_warps = _launch_shape(width)
        _add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, x if update is None else update, weight, normed, residual, *x_strides, *update_strides, num_rows,
            1 if x.ndim == 2 else x.shape[1], width, eps,
            HAS_UPDATE=update is not None, ROWS=rows, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return normed, residual


def _row_strides(name: str, x: Tensor) -> tuple[int, int]:
    """Of tokens and heads."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected adjacent elements in a row, got strides {list(x.stride())}")
    return x.stride(0), 0 if x.ndim == 2 else x.stride(1)


def _launch_shape(width: int) -> tuple[int, int, int]:
    """Rows per program, elements kept for each, warps per program."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(16, max(2, rows * block // 512))


def _aot_case(dtype: str, width: int, has_update: bool, heads: int = 1) -> AotCase:
    rows, block, num_warps = _launch_shape(width)
    constexprs: dict[str, object] = {"HAS_UPDATE": has_update, "ROWS": rows, "BLOCK": block}
    tensors = ("x_ptr", "update_ptr", "weight_ptr", "normed_ptr", "residual_ptr")
    strides = ("x_token_stride", "x_head_stride", "update_token_stride", "update_head_stride")
    signature = (
        dict.fromkeys(tensors, f"*{dtype}")
        | dict.fromkeys((*strides, "width"), "i32:16")
        | {"num_rows": "i32", "heads": "i32", "eps": "fp32"}
    )
    if heads == 1:
        del signature["heads"]
        constexprs["heads"] = 1  # Triton specialises on ones
    return AotCase(
        kernel=_add_rms_norm_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        label=f"{dtype} H={width} G={heads}{' update' if has_update else ''}",
    )


AOT = [
    *(_aot_case(dtype, 4096, True) for dtype in ("bf16", "fp16", "fp32")),
    _aot_case("bf16", 576, True),
    _aot_case("bf16", 8192, True),
    *(_aot_case(dtype, MAX_WIDTH, True) for dtype in ("bf16", "fp32")),
    _aot_case("bf16", 4096, False),
    *(_aot_case(dtype, 128, False, heads=8) for dtype in ("bf16", "fp16", "fp32")),
]
