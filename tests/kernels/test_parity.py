"""The parity matrix: every operation of every backend against the reference, regime by regime.

The cases stand in the `parity_*` modules beside this file, one per operation. On a machine with a CUDA device they run
there, elsewhere through Triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from parity import ParityCase

CASES: list[ParityCase] = [
    case for file in sorted(Path(__file__).parent.glob("parity_*.py")) for case in import_module(file.stem).CASES
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backends_agree_with_the_reference(case: ParityCase) -> None:
    case.check()
