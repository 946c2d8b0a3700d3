"""Parity of the MLP's gate with `kernels.fused.silu_gate`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import fused, triton_gate
from eyas.kernels.triton_gate import BLOCK

# float32: another exponential function. Half types: the roundings of silu and of the product may fall the other way.
RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

Check = Callable[[], None]
CASES: list[ParityCase] = []


def regime(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES.append(ParityCase("gate", "triton", name, check))
        return check

    return add


def random_rows(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[T, 2 I]`."""
    return (3.0 * torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width))).to(dtype).to(DEVICE)


def agree(gate_up: Tensor) -> None:
    expected = fused.silu_gate(gate_up)
    gated = triton_gate.silu_gate(gate_up)
    assert gated.dtype == gate_up.dtype
    torch.testing.assert_close(gated, expected, rtol=RELATIVE_TOLERANCE[gated.dtype], atol=1e-7, equal_nan=True)


@regime("widths")
def check_widths() -> None:
    """Catches gate and up split at a block's end instead of in the middle, and a ragged last block."""
    for width in (1, 48, 1000, BLOCK, BLOCK + 1, 14_336):
        agree(random_rows(3, width))


@regime("half types")
def check_half_types() -> None:
    """Catches an exponential or a product in half precision."""
    for dtype in (torch.bfloat16, torch.float16):
        agree(random_rows(9, 1536, dtype))


@regime("rows in a view")
def check_strided_rows() -> None:
    """Catches rows found without their stride."""
    agree(random_rows(5, 100)[:, :150])


@regime("many rows")
def check_many_rows() -> None:
    """Catches rows that share their gate with a neighbour's up."""
    agree(random_rows(130, 20))


@regime("no rows")
def check_no_rows() -> None:
    """Catches a launch of nothing."""
    agree(random_rows(0, 48))
    agree(random_rows(3, 0))


@regime("extreme gates")
def check_extreme_gates() -> None:
    """Catches an exponential that overflows into NaN, and faults that are swallowed or spread."""
    gates = [0.0, -0.0, 20.0, -20.0, 88.0, -88.0, 1e4, -1e4, 3e38, math.inf, math.nan, 1.0]
    rows = torch.tensor([gates + [2.0] * len(gates), gates + [-0.5] * len(gates)], device=DEVICE)
    with np.errstate(over="ignore", invalid="ignore"):
        agree(rows)
        rows[1, len(gates) :] = math.nan
        agree(rows)
