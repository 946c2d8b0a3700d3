"""Lets Triton 3.6's interpreter count to a number that a kernel was given: `range(n)` under NumPy 2.4 and later.

The interpreter holds every scalar as an array of one element, and NumPy no longer makes an int of that. Importing this
module puts it right; compiled kernels know nothing of it.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_and_index
