"""Lets Triton 3.6's interpreter multiply matrices of bfloat16, whose bit patterns it would multiply as integers.

Importing this module puts it right; compiled kernels know nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_create_dot = interpreter.InterpreterBuilder.create_dot


def _widened(operand: Any) -> Any:
    """The interpreter keeps bfloat16 as uint16, the upper halves of float32."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << np.uint32(16)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _create_wide_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
    return _create_dot(builder, _widened(a), _widened(b), *others)


interpreter.InterpreterBuilder.create_dot = _create_wide_dot
