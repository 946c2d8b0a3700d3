"""The check's figures as one picture: verify times over their floor, the draft loop, the attention backends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the steps that have figures into a PNG; draws nothing when none has."""
    panels = [name for name in PANELS if report["steps"].get(name, {}).get("rows")]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 5), squeeze=False)
    for name, ax in zip(panels, axes[0], strict=True):
        PANELS[name](ax, report["steps"][name])
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    what = "dry run on a CPU, figures mean nothing" if report["dry_run"] else report["machine"]["device"]
    figure.suptitle(f"{what}, {report['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _verify(ax: Axes, part: dict[str, Any]) -> None:
    for batch in sorted({row["batch"] for row in part["rows"]}):
        rows = [row for row in part["rows"] if row["batch"] == batch]
        ax.plot([row["nodes"] for row in rows], [row["ms"] for row in rows], marker="o", label=f"batch {batch}")
    ax.axhline(part["rows"][0]["floor_ms"], color="black", linestyle="--", label="bandwidth floor")
    ax.set(yscale="log", xlabel="nodes of each tree", ylabel="ms", title="verify step")
    ax.set_xscale("log", base=2)
    nodes = sorted({row["nodes"] for row in part["rows"]})
    ax.set_xticks(nodes, [str(count) for count in nodes])


def _draft(ax: Axes, part: dict[str, Any]) -> None:
    batches = [str(row["batch"]) for row in part["rows"]]
    places = range(len(batches))
    for shift, column in ((-0.2, "eager_ms"), (0.2, "graph_ms")):
        heights = [row[column] for row in part["rows"]]
        ax.bar([place + shift for place in places], heights, width=0.4, label=column.removesuffix("_ms"))
    ax.set_xticks(list(places), batches)
    ax.set(xlabel="batch", ylabel="ms", title="draft loop")


def _attention(ax: Axes, part: dict[str, Any]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in part["rows"]))
    for backend in dict.fromkeys(row["backend"] for row in part["rows"]):
        found = {row["case"]: row["ms"] for row in part["rows"] if row["backend"] == backend}
        ax.plot([found.get(case, math.nan) for case in cases], marker="o", label=backend)
    floor = {row["case"]: row["floor_ms"] for row in part["rows"]}
    ax.plot([floor[case] for case in cases], color="black", linestyle="--", label="floor: keys and values read once")
    ax.set_xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases], fontsize=7)
    ax.set(yscale="log", ylabel="ms", title="attention of one layer")


PANELS = {"verify_timing": _verify, "draft_timing": _draft, "attention_timing": _attention}
