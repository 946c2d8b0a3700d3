"""Run the steps of the GPU check one by one, each in a process of its own with a time limit, and report.

    benchmarks/gpu/check.sh [--dry-run] [--only STEP ...] [--output FOLDER]

A step that fails, hangs or takes the device down does not keep the others from running. Writes gpu-check-<date>.json
and .png; exits 1 if a step failed or a bar was missed. `--dry-run` needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import report
import torch
from outcome import Context, Outcome
from plot import plot
from rich.console import Console
from steps import STEPS, TOTAL_S, Step

RESULTS = report.ROOT / "benchmarks" / "results"
DRY_RESULTS = report.ROOT / "build" / "gpu-check"


def run_step(step: Step, dry_run: bool, limit_s: float, part_file: Path) -> dict[str, Any]:
    """The step in a process of its own; killed with all it started when its time is over."""
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__)), "--step", step.name, "--part", str(part_file)]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if dry_run else {})
    process = subprocess.Popen(
        command + ["--dry-run"] * dry_run, cwd=report.ROOT, env=environment, start_new_session=True
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return report.failed_part(f"not done after {limit_s:.0f} s", limit_s)
    seconds = time.monotonic() - start
    if not part_file.exists():
        return report.failed_part(f"ended with exit code {code}", seconds)
    part: dict[str, Any] = json.loads(part_file.read_text())
    return part


def run_here(name: str, context: Context, part_file: Path) -> None:
    """Body of a step's process: its outcome, or what it died of, into `part_file`."""
    [step] = [step for step in STEPS if step.name == name]
    if context.dry_run:
        torch.set_num_threads(1)
        importlib.import_module("eyas.kernels.interpreter").mend_interpreter()
    start = time.monotonic()
    try:
        outcome = step.run(context)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(failures=[f"{type(error).__name__}: {error}"])
    part_file.write_text(json.dumps(report.as_part(outcome, time.monotonic() - start)))


def check(names: list[str], dry_run: bool, output: Path) -> int:
    console = Console(width=150)
    parts: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + TOTAL_S
    with tempfile.TemporaryDirectory() as folder:
        for step in (step for step in STEPS if not names or step.name in names):
            limit_s = min(step.limit_s * (2 if dry_run else 1), deadline - time.monotonic())
            if limit_s <= 0:
                part = report.failed_part(f"the {TOTAL_S:.0f} s of the check were over", 0.0)
            else:
                console.print(f"[bold]{step.name}[/]: {step.title} (at most {limit_s:.0f} s)", highlight=False)
                part = run_step(step, dry_run, limit_s, Path(folder) / f"{step.name}.json")
            parts[step.name] = part
            report.print_step(console, step.title, part)
            console.print(f"  {part['status']} after {part['seconds']:.0f} s\n", highlight=False)
    merged = report.merge(parts, dry_run)
    file = output / f"gpu-check-{merged['date']}{'-dry' if dry_run else ''}.json"
    report.write(merged, file)
    plot(merged, file.with_suffix(".png"))
    failed = [name for name, part in parts.items() if report.is_failed(part)]
    console.print(f"{len(parts) - len(failed)} of {len(parts)} steps passed; {file}", highlight=False, soft_wrap=True)
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/]")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to see that all of it runs")
    parser.add_argument("--only", nargs="+", default=[], choices=[step.name for step in STEPS], metavar="STEP")
    parser.add_argument("--output", type=Path, help="folder of the report")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run goes without one")
    if args.step:
        run_here(args.step, Context(args.dry_run), args.part)
        return 0
    return check(args.only, args.dry_run, args.output or (DRY_RESULTS if args.dry_run else RESULTS))


if __name__ == "__main__":
    sys.exit(main())
