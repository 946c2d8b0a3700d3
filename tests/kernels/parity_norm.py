"""Parity of norm and residual with `kernels.fused.add_rms_norm`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import fused, triton_norm

# One rounding to the tensors' type may fall the other way; in float32 the sum of squares has another order.
RELATIVE_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
MAX_DIFFERING = 0.02  # share of a half type's elements: one rounding in many falls the other way, not every fourth
SUM_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
if DEVICE.type == "cpu":  # Triton's interpreter cuts bfloat16 off instead of rounding it, here twice
    RELATIVE_TOLERANCE[torch.bfloat16] = 3 * 2**-7
    SUM_TOLERANCE[torch.bfloat16] = 2**-7
EPS = 1e-5

Check = Callable[[], None]
CASES: list[ParityCase] = []


def regime(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES.append(ParityCase("norm", "triton", name, check))
        return check

    return add


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def agree(x: Tensor, update: Tensor | None, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """The kernel's norm and the reference's. Sums must be equal bit for bit: they are the residual stream."""
    weight = (1.0 + 0.3 * random_rows(x.shape[-1], seed=9)).to(x.dtype)
    before = x.clone()
    expected, expected_sum = fused.add_rms_norm(x, update, weight, eps)
    normed, residual = triton_norm.add_rms_norm(x, update, weight, eps)
    assert normed.dtype == x.dtype
    assert normed.shape == x.shape
    torch.testing.assert_close(normed, expected, rtol=RELATIVE_TOLERANCE[x.dtype], atol=1e-7, equal_nan=True)
    torch.testing.assert_close(residual, expected_sum, rtol=SUM_TOLERANCE[x.dtype], atol=0.0, equal_nan=True)
    assert update is not None or residual is x
    torch.testing.assert_close(x, before, rtol=0.0, atol=0.0, equal_nan=True)
    return normed, expected


@regime("widths")
def check_widths() -> None:
    """Catches columns past the row's end that count in the mean, and widths that fill several rows of a program."""
    for width in (1, 2, 31, 64, 576, 1024, 1025, 4096):
        agree(random_rows(5, width), random_rows(5, width, seed=1))


@regime("widest rows")
def check_widest_rows() -> None:
    """Catches a row that does not fit the program."""
    for dtype in (torch.float32, torch.bfloat16):
        agree(
            random_rows(2, triton_norm.MAX_WIDTH, dtype=dtype),
            random_rows(2, triton_norm.MAX_WIDTH, dtype=dtype, seed=1),
        )


@regime("half types")
def check_half_types() -> None:
    """Catches a norm of the unrounded sum, a weight applied after rounding, and sums of squares in half precision."""
    for dtype in (torch.bfloat16, torch.float16):
        x, update = 10.0 * random_rows(40, 576, dtype=dtype), random_rows(40, 576, dtype=dtype, seed=1) / 3
        for pending in (update, None):
            normed, expected = agree(x, pending)
            if SUM_TOLERANCE[dtype] == 0.0:
                assert int((normed != expected).sum()) <= MAX_DIFFERING * expected.numel()


@regime("no update")
def check_no_update() -> None:
    """Catches an update read though there is none, and a stream that is copied or written."""
    for width in (64, 4096):
        agree(random_rows(7, width), None)


@regime("heads in a view")
def check_heads() -> None:
    """Catches query and key norms that read heads as if they were adjacent over tokens."""
    qkv = random_rows(6, 12, 64)
    query, key, _ = qkv.split([8, 2, 2], dim=1)
    for heads in (query, key, key[:, :1]):
        assert not heads.is_contiguous()
        agree(heads, None)
    agree(query, random_rows(6, 8, 64, seed=1))


@regime("rows in a view")
def check_strided_rows() -> None:
    """Catches rows found without their stride, as parts of captured features are."""
    for part in random_rows(4, 3 * 96).chunk(3, dim=-1):
        agree(part, None)
        agree(random_rows(4, 96, seed=2), part)


@regime("ragged last program")
def check_ragged_rows() -> None:
    """Catches rows past the last one being written: several short rows share a program."""
    for rows in (1, 15, 16, 17, 65):
        agree(random_rows(rows, 64), random_rows(rows, 64, seed=1))


@regime("no rows")
def check_no_rows() -> None:
    """Catches a launch of nothing."""
    agree(random_rows(0, 64), random_rows(0, 64))
    agree(random_rows(0, 8, 64), None)


@regime("extreme rows")
def check_extreme_rows() -> None:
    """Catches a missing or misplaced eps, and a NaN that spreads to the rows of its program."""
    x = random_rows(16, 64)
    x[0] = 0.0
    x[1] = 1e-4
    x[2] = 1e8
    x[3, 5] = math.nan
    x[4, 5] = math.inf
    with np.errstate(invalid="ignore"):
        agree(x, None)
        agree(x, random_rows(16, 64, seed=1))
        agree(x, None, eps=0.5)
