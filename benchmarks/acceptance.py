"""Acceptance and speed over tree shapes, from `eyas bench offline`: the table a default shape is chosen by.

    python benchmarks/acceptance.py --prompts FILE --limit 20 [--dtype bfloat16] [--temperature 0] [--repeats 3]
        [--shapes 1x0x1,4x3x1,8x4x4] [--head medusa=FOLDER --head eagle=FOLDER ...] [--out results/NAME]

Each shape is `nodes x depth x width`; 1x0x1 is no speculation. With named heads every shape is measured with every
head, and no speculation once. Rows take turns within a repeat, and the median of the repeats is reported, so that a
machine whose speed drifts hits all of them alike. Writes NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.deployments.bench import bench_offline
from eyas.deployments.settings import EngineSettings
from eyas.deployments.shapes import parse_shape, shape_settings

FIGURES = ("acceptance_length", "tokens_per_s", "draft_ms", "verify_ms", "other_ms")


def rows_of(args: argparse.Namespace) -> dict[str, EngineSettings]:
    """Label and settings of everything that is measured, in order."""
    heads = [head.rpartition("=")[::2] for head in args.head] or [("", None)]
    rows = {}
    for name, head in heads:
        for text in args.shapes.split(","):
            shape = parse_shape(text)
            drafts = shape.node_budget > 1
            tree = shape_settings(shape) if drafts else {"speculate": False}
            label = f"{name} {text}" if name and drafts else text
            rows[label] = EngineSettings.model_validate(
                {
                    **tree,
                    "dtype": args.dtype,
                    "max_batch_size": args.batch,
                    "threads_per_worker": args.threads,
                    "shares_noise": args.candidate_noise == "shared",
                    "acceptance_prior": not args.raw_scores,
                    **({"head": head} if head and drafts else {}),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head", action="append", default=[], help="FOLDER or NAME=FOLDER; may be given often")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--candidate-noise", choices=["shared", "none"], default="shared")
    parser.add_argument("--raw-scores", action="store_true", help="grow trees without the heads' acceptance priors")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", default="1x0x1,4x3x1,6x5x1,6x3x3,8x3x4,8x4x4,12x4x4,16x5x4")
    parser.add_argument("--out", type=Path, default=None, help="path without ending for JSON and PNG")
    args = parser.parse_args()

    settings = rows_of(args)
    reports: dict[str, list[dict[str, Any]]] = {label: [] for label in settings}
    for _ in range(args.repeats):
        for label, row in settings.items():
            report = bench_offline(row, args.prompts, args.max_tokens, args.temperature, 0, False, args.limit)
            reports[label].append(report)
    rows = {
        label: {name: statistics.median(report[name] for report in runs) for name in FIGURES}
        for label, runs in reports.items()
    }
    first = next(iter(reports.values()))[0]
    _print(rows, first, args.batch)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        summary = {"settings": first["settings"], "machine": first["machine"], "repeats": args.repeats, "shapes": rows}
        args.out.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
        _plot(rows, args.out.with_suffix(".png"))


def _print(rows: dict[str, dict[str, float]], first: dict[str, Any], batch: int) -> None:
    settings, machine = first["settings"], first["machine"]
    table = Table(
        title=f"{settings['model']} {settings['dtype']} T={settings['temperature']}, batch {batch}, "
        f"{machine['cpu']}, {settings['threads_per_worker']} threads"
    )
    table.add_column("nodes x depth x width")
    first_speed = next(iter(rows.values()))["tokens_per_s"]
    for name in (*FIGURES, "speed / first"):
        table.add_column(name, justify="right")
    for label, row in rows.items():
        table.add_row(label, *(f"{row[name]:.2f}" for name in FIGURES), f"{row['tokens_per_s'] / first_speed:.2f}")
    Console(width=140).print(table)


def _plot(rows: dict[str, dict[str, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shapes = list(rows)
    left.bar(shapes, [rows[shape]["acceptance_length"] for shape in shapes], color="#4477aa")
    left.set_ylabel("tokens per verify step")
    bottom = [0.0] * len(shapes)
    for name, color in (("draft_ms", "#ee6677"), ("verify_ms", "#4477aa"), ("other_ms", "#bbbbbb")):
        values = [rows[shape][name] for shape in shapes]
        right.bar(shapes, values, bottom=bottom, label=name, color=color)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.set_ylabel("ms per step")
    right.legend()
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=60)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
