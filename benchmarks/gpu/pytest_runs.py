"""Runs of the project's own tests as steps of the check: pytest in a process of its own, counted from its report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from outcome import Outcome
from report import ROOT

MATRIX = "tests/kernels/test_parity.py"
PROCESSES = str(min(8, (os.cpu_count() or 2) // 2))  # they compile kernels most of the time
# Filters of the project's own test runs name warnings of the versions it is developed with.
OPTIONS = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "--tb=short", "--no-header"]


@dataclass(slots=True)
class Tally:
    """Results of one run of pytest."""

    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def run_tests(what: str, arguments: list[str], outcome: Outcome, parallel: bool = False) -> None:
    """Add a run's counts, failures and reasons of skipping to `outcome`.

    Args:
        parallel: over some processes, where pytest-xdist is installed.
    """
    tally = _pytest(arguments, parallel)
    outcome.rows.append({"what": what, "passed": tally.passed, "failed": len(tally.failures), "skipped": tally.skipped})
    outcome.failures += tally.failures
    outcome.omitted += [f"{count} tests: {reason}" for reason, count in tally.reasons.items()]
    if not tally.passed:
        outcome.failures.append(f"{what}: no test passed")


def one_regime_each(selection: str) -> list[str]:
    """Of the matrix cases that `selection` names, the first regime of every operation and backend."""
    command = [sys.executable, "-m", "pytest", "--collect-only", *OPTIONS, "-k", selection, MATRIX]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    first: dict[tuple[str, ...], str] = {}
    for line in listed.splitlines():
        if "[" in line and line.endswith("]"):
            case = line[line.index("[") + 1 : -1]
            first.setdefault(tuple(case.split("-")[:2]), line)
    if not first:
        raise RuntimeError(f"no case of the parity matrix was found:\n{listed[-500:]}")
    return list(first.values())


def _pytest(arguments: list[str], parallel: bool) -> Tally:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = [*OPTIONS, f"--junitxml={results}"]
        if parallel and importlib.util.find_spec("xdist"):
            options += ["-n", PROCESSES]
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        if not results.exists():
            return Tally(failures=[f"pytest ended with exit code {finished.returncode}: {finished.stdout[-500:]}"])
        return _read(results)


def _read(results: Path) -> Tally:
    tally = Tally()
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        skip = case.find("skipped")
        if problem is not None:
            first_line = (problem.get("message") or "").splitlines()[:1]
            tally.failures.append(f"{name}: {' '.join(first_line)[:200]}")
        elif skip is not None:
            tally.skipped += 1
            tally.reasons[(skip.get("message") or "").strip()] += 1
        else:
            tally.passed += 1
    return tally
