# mypy: allow-untyped-decorators, allow-untyped-defs
"""What is mended in Triton's interpreter, on kernels of the tests' own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from eyas.kernels.interpreter import is_interpreting, mend_interpreter

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="kernels are compiled where there is a CUDA device")


@triton.jit
def _count_kernel(out_ptr, count):
    total = 0
    for step in range(0, count):
        total += step
    tl.store(out_ptr, total)


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    places = rows * 16 + columns
    tl.store(out_ptr + places, tl.dot(tl.load(a_ptr + places), tl.load(b_ptr + places)))


def test_a_kernel_counts_to_a_number_it_was_given() -> None:
    """Catches an interpreter that makes no int of its scalars."""
    out = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(1,)](out, 5)
    assert out.item() == 10


def test_matrices_of_bfloat16_are_multiplied_as_numbers() -> None:
    """Catches bit patterns multiplied as integers."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    out = torch.zeros(16, 16)
    _product_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_mending_twice_is_mending_once() -> None:
    """Catches patches stacked on each other."""
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.create_dot
    mend_interpreter()
    assert interpreter.InterpreterBuilder.create_dot is before
