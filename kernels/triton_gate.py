# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.fused.silu_gate` in Triton.

    out = round(gate / (1 + exp(-gate))) * up

in float32, rounded to the tensors' own type at `round` and at the end, as the reference does.

Letters: T tokens, I MLP width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase

BLOCK = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _silu_gate_kernel(gate_up_ptr, out_ptr, token_stride, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    gate_ptr = gate_up_ptr + token * token_stride
    gate = tl.load(gate_ptr + columns, mask=is_column, other=0.0)
    up = tl.load(gate_ptr + width + columns, mask=is_column, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * width + columns, (silu * up).to(gate.dtype), mask=is_column)


def silu_gate(gate_up: Tensor) -> Tensor:
    """See `kernels.fused.silu_gate`.

    Raises:
        ValueError: unless it is float32, bfloat16 or float16 `[T, 2 I]` with adjacent columns.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in DTYPES:
        raise ValueError(
            f"gate_up: expected float32, bfloat16 or float16 [T, 2 I], got {gate_up.dtype} {list(gate_up.shape)}"
        )
    if gate_up.shape[1] and gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: expected adjacent columns, got strides {list(gate_up.stride())}")
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_gate_kernel[(tokens, triton.cdiv(width, BLOCK))](gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK)
    return out


AOT = [
    AotCase(
        kernel=_silu_gate_kernel,
        signature={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "token_stride": kind, "width": kind},
        constexprs={"BLOCK": BLOCK},
        label=f"{dtype} I {kind}",
    )
    for dtype in ("bf16", "fp16", "fp32")
    for kind in ("i32:16", "i32")
]
