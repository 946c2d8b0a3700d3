"""Rounding sizes up, so that training steps come in few shapes.

For every new shape the CPU's matrix library makes kernels, and the heap looks for memory that fits.
"""

from __future__ import annotations


def rounded_up(size: int, step: int) -> int:
    """The next multiple of `step` that is no less than `size`."""
    return -(-size // step) * step
