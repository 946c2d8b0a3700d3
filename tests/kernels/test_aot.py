"""Every specialisation of every Triton kernel compiles for sm_80, sm_90 and sm_100 and spills nothing.

Kernels are compiled in a process of their own, since this one defines them for Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_sources import launched_kernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPILE_ALL = BENCHMARKS / "compile_kernels.py"
COMMITTED = BENCHMARKS / "results" / "triton-aot.json"

SPILLING_KERNEL = """
import triton
import triton.language as tl

from eyas.kernels.aot import AotCase


@triton.jit
def centre_kernel(row_ptr, B: tl.constexpr):
    at = tl.arange(0, B)
    row = tl.load(row_ptr + at)
    tl.store(row_ptr + at, row - tl.sum(row))  # the whole row lives on through the sum


AOT = [
    AotCase(centre_kernel, {"row_ptr": "*fp32"}, {"B": 256}, num_warps=1, label="fits"),
    AotCase(centre_kernel, {"row_ptr": "*fp32"}, {"B": 16384}, num_warps=1, label="spills"),
    AotCase(centre_kernel, {"row_ptr": "*fp32"}, {"B": 100}, num_warps=1, label="no power of two"),
]
"""
COMPILE_MODULE = """
import sys

from compile_kernels import main

if __name__ == "__main__":
    sys.exit(main(["--output", sys.argv[2]], [sys.argv[1]]))
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{BENCHMARKS}{os.pathsep}{script.parent}"
    return subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One run over all kernels, and its report."""
    report = tmp_path_factory.mktemp("aot") / "report.json"
    finished = run(COMPILE_ALL, "--output", str(report))
    return finished, json.loads(report.read_text())


def test_all_kernels_compile_and_none_spills(
    compiled: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    finished, report = compiled
    assert finished.returncode == 0, finished.stderr
    assert report["cases"]
    assert [case for case in report["cases"] if case["spill_bytes"] or case["stack_bytes"]] == []


def test_every_launched_kernel_has_a_case(compiled: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    _, report = compiled
    assert {case["kernel"] for case in report["cases"]} == launched_kernels()


def test_the_committed_report_is_of_these_kernels(
    compiled: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, report = compiled
    committed = json.loads(COMMITTED.read_text())
    if report["triton"] != committed["triton"]:  # another compiler, other registers: then only the cases must agree
        for case in report["cases"] + committed["cases"]:
            del case["registers"], case["shared_bytes"]
    assert committed["cases"] == report["cases"], f"out of date: run {COMPILE_ALL.relative_to(BENCHMARKS.parent)}"


def test_what_spills_or_does_not_compile_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "spilling_kernel.py").write_text(SPILLING_KERNEL)
    (tmp_path / "compile_module.py").write_text(COMPILE_MODULE)
    finished = run(tmp_path / "compile_module.py", "spilling_kernel", str(tmp_path / "report.json"))
    assert finished.returncode == 1
    assert "centre_kernel[spills] sm_90: spills" in finished.stderr
    assert "centre_kernel[no power of two] sm_80: CompilationError" in finished.stderr
    assert "centre_kernel[fits]" not in finished.stderr
    cases = json.loads((tmp_path / "report.json").read_text())["cases"]
    spilled = {(case["label"], case["capability"]): case["spill_bytes"] for case in cases}
    assert spilled.keys() == {(label, capability) for label in ("fits", "spills") for capability in (80, 90, 100)}
    assert all((spilled[label, capability] > 0) == (label == "spills") for label, capability in spilled)


def test_under_the_interpreter_nothing_is_compiled() -> None:
    finished = subprocess.run(
        [sys.executable, str(COMPILE_ALL)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert "TRITON_INTERPRET" in finished.stderr
