"""Parity of FlashInfer's elementwise kernels and nucleus with the reference; see `parity_flashinfer`."""

from __future__ import annotations

from collections.abc import Callable

import flashinfer_double
import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import flashinfer_ops, fused, sample

flashinfer_double.install()

# One rounding to the type may fall the other way, in norms each of two.
TOLERANCES = {torch.float16: 2**-9, torch.bfloat16: 2**-6}

Check = Callable[[], None]
CASES: list[ParityCase] = []


def regime(operation: str, name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES.append(ParityCase(operation, "flashinfer", name, check))
        return check

    return add


def random_rows(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def norms_agree(x: Tensor, update: Tensor | None) -> None:
    weight = (1.0 + 0.3 * random_rows(x.shape[-1], seed=9)).to(x.dtype)
    before = x.clone()
    expected, expected_sum = fused.add_rms_norm(x, update, weight, 1e-5)
    normed, residual = flashinfer_ops.add_rms_norm(x, update, weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCES[x.dtype], atol=1e-6, equal_nan=True)
    assert torch.equal(residual.nan_to_num(9.0), expected_sum.nan_to_num(9.0))
    assert torch.equal(x.nan_to_num(9.0), before.nan_to_num(9.0))


@regime("norm", "rows_and_heads")
def check_rows_and_heads() -> None:
    """Catches a mean over heads instead of within one, an update left out, and inputs written over."""
    for dtype in TOLERANCES:
        norms_agree(random_rows(5, 256, dtype=dtype), random_rows(5, 256, dtype=dtype, seed=1))
        norms_agree(random_rows(1, 64, dtype=dtype), None)
        norms_agree(random_rows(3, 4, 64, dtype=dtype), None)


@regime("norm", "nan_logits")
def check_nan_rows() -> None:
    """Catches a NaN that spreads to other rows or is swept under."""
    x = random_rows(4, 128)
    x[2, 5] = torch.nan
    norms_agree(x, random_rows(4, 128, seed=1))


@regime("gate", "widths")
def check_gate() -> None:
    """Catches gate and up taken for one another."""
    for dtype in TOLERANCES:
        for width in (8, 96, 1024):
            gate_up = random_rows(3, 2 * width, dtype=dtype)
            expected = fused.silu_gate(gate_up)
            found = flashinfer_ops.silu_gate(gate_up)
            # The reference rounds silu(gate) before it multiplies.
            torch.testing.assert_close(found, expected, rtol=2 * TOLERANCES[dtype], atol=1e-6)


def nuclei_agree(logits: Tensor, top_p: list[float]) -> None:
    limits = torch.tensor(top_p, device=DEVICE)
    assert torch.equal(flashinfer_ops.nucleus(logits, limits), sample.nucleus(logits, limits))


@regime("nucleus", "ragged")
def check_nucleus() -> None:
    """Catches rows that take another's top-p, rows of top-p 1 that lose tokens, and nuclei one token too long."""
    logits = 3.0 * random_rows(6, 300, dtype=torch.float32)
    nuclei_agree(logits, [0.1, 1.0, 0.9, 0.5, 1.0, 0.99])
    nuclei_agree(logits[:1], [0.7])


@regime("nucleus", "ties")
def check_nucleus_ties() -> None:
    """Catches a nucleus that keeps some of the tokens tied with its last."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -torch.inf], [0.0] * 6], device=DEVICE)
    nuclei_agree(logits, [0.5, 0.3])
