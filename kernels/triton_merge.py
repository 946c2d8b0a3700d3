# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""Merge of attention over disjoint sets of keys, in Triton: one program per row and head.

Each split s has attended its own keys and knows the log (base 2) of its softmax denominator, l_s:

    out = sum_s 2^(l_s - m) out_s / sum_s 2^(l_s - m),   m = max_s l_s

A split that saw no key says so by l_s = -inf, and its out_s, which nobody wrote, is not read. It knows nothing of what
the keys were.

Letters: C splits, T rows, H heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.launch_checks import check_layout

MAX_SPLITS = 128
_SPLITS_AT_ONCE = 16  # independent loads in flight


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_splits"])
def _merge_kernel(
    partial_ptr,
    log_totals_ptr,
    row_starts_ptr,
    out_ptr,
    num_rows,
    num_requests,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(row_starts_ptr + num_requests):
        return
    out_row = row.to(tl.int64) * NUM_HEADS + tl.program_id(1)
    split_stride = num_rows.to(tl.int64) * NUM_HEADS
    splits = tl.arange(0, MAX_SPLITS)
    log_totals = tl.load(
        log_totals_ptr + splits * split_stride + out_row, mask=splits < num_splits, other=-float("inf")
    )
    top = tl.max(log_totals, axis=0)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(log_totals - top), axis=0)

    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        rows = split * split_stride + out_row
        log_total = tl.load(log_totals_ptr + rows, mask=split < num_splits, other=-float("inf"))
        is_cell = (log_total > -float("inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=is_cell, other=0.0)
        acc += tl.sum(tl.exp2(log_total - top)[:, None] * partial, axis=0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + out_row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def merge_splits(partial: Tensor, log_totals: Tensor, row_starts: Tensor, out: Tensor) -> None:
    """Write `out [T, H, D]`, but no row from `row_starts[-1]` on (int32 `[B + 1]`).

    Args:
        partial: attention of each split, float32 `[C, T, H, D]`.
        log_totals: logs, base 2, of their denominators, float32 `[C, T, H]`.

    Raises:
        ValueError: for more than `MAX_SPLITS` splits, or a tensor that is not contiguous and as documented.
    """
    num_rows, num_heads, head_dim = out.shape
    num_splits = partial.shape[0]
    if num_splits > MAX_SPLITS:
        raise ValueError(f"{num_splits} splits, at most {MAX_SPLITS} can be merged")
    check_layout("out", out, (num_rows, num_heads, head_dim), out.dtype, out.device)
    check_layout("partial", partial, (num_splits, num_rows, num_heads, head_dim), torch.float32, out.device)
    check_layout("log_totals", log_totals, (num_splits, num_rows, num_heads), torch.float32, out.device)
    check_layout("row_starts", row_starts, (row_starts.numel(),), torch.int32, out.device)
    _merge_kernel[(num_rows, num_heads)](
        partial,
        log_totals,
        row_starts,
        out,
        num_rows,
        row_starts.numel() - 1,
        num_splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        MAX_SPLITS=MAX_SPLITS,
        BLOCK_S=_SPLITS_AT_ONCE,
    )


def _aot_case(dtype: str, num_heads: int, head_dim: int) -> AotCase:
    return AotCase(
        kernel=_merge_kernel,
        signature={"partial_ptr": "*fp32", "log_totals_ptr": "*fp32", "row_starts_ptr": "*i32", "out_ptr": f"*{dtype}"}
        | dict.fromkeys(("num_rows", "num_requests", "num_splits"), "i32"),
        constexprs={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "MAX_SPLITS": MAX_SPLITS,
            "BLOCK_S": _SPLITS_AT_ONCE,
        },
        label=f"{dtype} H={num_heads} D={head_dim}",
    )


AOT = [
    _aot_case("bf16", 32, 128),
    _aot_case("fp16", 32, 64),
    _aot_case("bf16", 32, 80),
    _aot_case("bf16", 8, 96),
    _aot_case("fp32", 8, 256),
]
