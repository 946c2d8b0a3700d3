"""What launchers require of their tensors: the layout that a kernel's address arithmetic takes for granted."""

from __future__ import annotations

import torch
from torch import Tensor


def check_layout(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ValueError` unless `tensor` is contiguous, of this shape and type, on this device. Reads no values."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name}: expected {dtype} {list(shape)} on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected contiguous, got strides {list(tensor.stride())}")
