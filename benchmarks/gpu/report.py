"""The check's result: one JSON over all steps, with the machine and versions the figures belong to, and its tables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from outcome import Outcome
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy")


def machine() -> dict[str, object]:
    """The device, or the processor of a dry run."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "processor": platform.machine(), "cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str:
    """Of the checkout; a copy without its repository names it in $EYAS_COMMIT."""
    return os.environ.get("EYAS_COMMIT") or _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown"


def as_part(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """A step's outcome as it stands in the report."""
    bars = [asdict(bar) | {"is_met": bar.is_met} for bar in outcome.bars]
    status = "failed" if outcome.failures else "passed"
    return {"status": status, "seconds": round(seconds, 1)} | asdict(outcome) | {"bars": bars}


def failed_part(reason: str, seconds: float) -> dict[str, Any]:
    """Of a step that did not come back with an outcome."""
    return as_part(Outcome(failures=[reason]), seconds)


def merge(parts: dict[str, dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "dry_run": dry_run,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "command": " ".join(sys.argv),
        "steps": parts,
    }


def is_failed(part: dict[str, Any]) -> bool:
    return part["status"] == "failed" or not all(bar["is_met"] for bar in part["bars"])


def print_step(console: Console, title: str, part: dict[str, Any]) -> None:
    """One step's table, its bars, and what it left out or broke."""
    if part["rows"]:
        table = Table(title=title, title_justify="left")
        for column in part["rows"][0]:
            table.add_column(column.replace("_", " "), justify="left" if column in ("what", "case") else "right")
        for row in part["rows"]:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    for bar in part["bars"]:
        mark = "[green]met[/]" if bar["is_met"] else "[red]missed[/]"
        console.print(f"  {bar['name']}: {bar['value']:.3f}, at most {bar['limit']}: {mark}")
    for what in part["omitted"]:
        console.print(f"  [yellow]left out:[/] {escape(what)}", highlight=False, soft_wrap=True)
    for failure in part["failures"]:
        console.print(f"  [red]failed:[/] {escape(failure)}", highlight=False, soft_wrap=True)


def write(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
