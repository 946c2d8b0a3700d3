"""Cases of the parity matrix: one operation, one backend's implementation of it, one regime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eyas.kernels.interpreter import mend_interpreter

# Where the matrix runs: the real device, or the CPU through Triton's interpreter (switched on in tests/conftest.py).
# With its index, as tensors have it: launchers compare devices.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

mend_interpreter()


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One cell of the matrix.

    Args:
        regime: names the situation; the module that lists it says which fault it catches.
        check: runs the reference and the backend's implementation on `DEVICE` and asserts that they agree.
    """

    operation: str
    backend: str
    regime: str
    check: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.operation}-{self.backend}-{self.regime}"
