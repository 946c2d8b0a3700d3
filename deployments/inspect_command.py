"""`eyas inspect PATH`: prints an `Inspection` as a table or as JSON; status 1 if something is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.deployments.inspection import Inspection, inspect_path
from eyas.models.catalog import DEFAULT_HEAD, DEFAULT_TARGET, resolve_target, shipped_head
from eyas.models.head_files import HeadOptions


def add_inspect_parser(subparsers: Any) -> None:
    """Add `inspect` to an `argparse` subparsers object."""
    parser = subparsers.add_parser("inspect", help="what a head or model is, how it is read, what it costs")
    parser.add_argument("path", help=f"folder or file of a head, a model folder, {DEFAULT_HEAD} or {DEFAULT_TARGET}")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="the model the head is meant for [%(default)s]")
    parser.add_argument("--no-target", action="store_true", help="look at the head by itself")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    """Carry out `eyas inspect`."""
    path = {DEFAULT_HEAD: shipped_head, DEFAULT_TARGET: lambda: resolve_target(DEFAULT_TARGET)}.get(
        args.path, lambda: Path(args.path).expanduser()
    )()
    target = None if args.no_target else resolve_target(args.target)
    found = inspect_path(path, target, HeadOptions())
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _print_table(found)
    return 1 if found.problems else 0


def _print_table(found: Inspection) -> None:
    table = Table(title=found.what, show_header=False)
    for name, value in found.fields.items():
        table.add_row(name, str(value))
    table.add_section()
    table.add_row("tensors", str(found.num_tensors))
    table.add_row("bytes", f"{found.num_bytes:,}")
    if found.cost is not None:
        table.add_row("cost of a drafted level (target pass = 1)", f"{found.cost:.3f}")
    if found.extend_cost is not None:
        table.add_row("cost of a committed token (target pass = 1)", f"{found.extend_cost:.3f}")
    table.add_section()
    for problem in found.problems or ["none"]:
        table.add_row("problem" if found.problems else "problems", problem)
    Console(soft_wrap=True).print(table)
