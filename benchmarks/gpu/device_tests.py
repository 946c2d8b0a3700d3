"""Step: the parity matrix on the device, Triton against the reference, and the tests that need a device.

In a dry run the matrix goes through Triton's interpreter, one regime of each operation.
"""

from __future__ import annotations

from outcome import Context, Outcome
from pytest_runs import one_regime_each, run_tests
from report import ROOT

KERNEL_TESTS = [
    "tests/kernels",
    "--ignore=tests/kernels/test_aot.py",
    "--ignore=tests/kernels/test_gpu_check.py",
    "--ignore=tests/kernels/test_mutations.py",
]
SELECTION = "not flashinfer"  # has a step of its own: it compiles for minutes
DEVICE_MARK = "pytest.mark.gpu"


def run(context: Context) -> Outcome:
    outcome = Outcome()
    if context.dry_run:
        run_tests("parity matrix, one regime each, interpreted", one_regime_each(SELECTION), outcome)
        outcome.omitted.append("the other regimes of the matrix: `make test` runs them through the interpreter")
        outcome.omitted.append("tests marked gpu: there is no device")
        return outcome
    run_tests("parity matrix and kernel tests", [*KERNEL_TESTS, "-k", SELECTION], outcome, parallel=True)
    run_tests("tests marked gpu", [*_files_with_device_tests(), "-m", "gpu"], outcome)
    return outcome


def _files_with_device_tests() -> list[str]:
    return [
        str(file.relative_to(ROOT))
        for folder in ("tests/kernels", "tests/workers", "tests/models")
        for file in sorted((ROOT / folder).glob("test_*.py"))
        if DEVICE_MARK in file.read_text()
    ]
