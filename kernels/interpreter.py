"""What Triton's interpreter lacks on the way to running Eyas's kernels on a CPU, as of Triton 3.6.

It holds every scalar as an array of one element, of which NumPy 2.4 and later make no int: `range(n)` over a number
that a kernel was given fails. And it keeps bfloat16 as bit patterns, which its matrix product multiplies as integers.
Compiled kernels know nothing of this.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np


def is_interpreting() -> bool:
    """Whether kernels defined from now on are interpreted."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def mend_interpreter() -> None:
    """Put both right, once per process; without the interpreter nothing is done."""
    if not is_interpreting():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << np.uint32(16)  # the upper halves of float32
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_wide_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), *others)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_wide_dot
