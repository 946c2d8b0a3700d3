"""Break one line of each Triton kernel, and of what FlashInfer is called with, and the parity matrix goes red.

`mutations/*.json` lists the breaks: the line as it stands, the broken one, and the cases of the matrix that notice it.
Each runs on a copy of `kernels/` in a process of its own, two at a time. Red means that numbers differed: a kernel that
does not compile or crashes, or a name that no case carries, proves nothing; so breaks stay within their buffers.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_sources import FOLDER, jit_functions

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
# The matrix needs none of these; they take longer to import than its cases to run. What the first sets in the
# environment, `TRITON_INTERPRET`, is inherited from here.
WITHOUT = ["--noconftest", "-p", "no:hypothesispytest", "-p", "no:anyio"]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One broken line, as the JSON files spell it."""

    file: str
    kernel: str
    old: str
    new: str
    cases: str

    def __str__(self) -> str:
        return self.kernel

    def apply(self, folder: Path) -> None:
        """Break the line in a copy of the kernels; it must be found exactly once, within the kernel."""
        path = folder / Path(self.file).name
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        places = [index for index, line in enumerate(lines) if line.strip() == self.old.strip()]
        [kernel] = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef) and node.name == self.kernel and node.end_lineno is not None
        ]
        inside = [index for index in places if kernel.lineno <= index + 1 <= kernel.end_lineno]
        assert len(inside) == 1, f"{self.kernel}: {len(inside)} lines {self.old.strip()!r}"
        line = lines[inside[0]]
        lines[inside[0]] = line[: len(line) - len(line.lstrip())] + self.new.strip() + "\n"
        assert lines[inside[0]] != line
        path.write_text("".join(lines))


MUTATIONS = [
    Mutation(**fields)
    for file in sorted((Path(__file__).parent / "mutations").glob("*.json"))
    for fields in json.loads(file.read_text())
]


def run_matrix(kernels: Path, cases: str) -> subprocess.CompletedProcess[str]:
    """The parity matrix over the kernels of that folder, up to its first failure."""
    settings = {"MUTATED_KERNELS": str(kernels), "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    options = ["-p", "mutated_kernels", "-p", "no:cacheprovider", "-x", "-q", "--tb=short", "-k", cases, *WITHOUT]
    command = [sys.executable, "-m", "pytest", *options, "tests/kernels/test_parity.py"]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def copy_kernels(folder: Path) -> Path:
    return Path(shutil.copytree(FOLDER, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Mutation | None, subprocess.CompletedProcess[str]]:
    """Every mutation's run, and under None the run of all their cases over an unbroken copy."""

    def run(mutation: Mutation | None) -> subprocess.CompletedProcess[str]:
        kernels = copy_kernels(tmp_path_factory.mktemp("mutation"))
        if mutation is None:
            return run_matrix(kernels, " or ".join(f"({mutation.cases})" for mutation in MUTATIONS))
        mutation.apply(kernels)
        return run_matrix(kernels, mutation.cases)

    everything: list[Mutation | None] = [None, *MUTATIONS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(everything, pool.map(run, everything), strict=True))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_broken_line_turns_the_matrix_red(
    runs: dict[Mutation | None, subprocess.CompletedProcess[str]], mutation: Mutation
) -> None:
    finished = runs[mutation]
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "AssertionError" in finished.stdout, finished.stdout


def test_the_same_cases_are_green_over_an_unbroken_copy(
    runs: dict[Mutation | None, subprocess.CompletedProcess[str]],
) -> None:
    assert runs[None].returncode == 0, runs[None].stdout + runs[None].stderr


def test_every_triton_function_is_broken_at_least_once() -> None:
    broken = {(Path(mutation.file).name, mutation.kernel) for mutation in MUTATIONS}
    functions = {(file, name) for file, names in jit_functions().items() for name in names}
    assert functions - broken == set()
