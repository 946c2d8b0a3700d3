"""The ablation table of docs/training.md: how recipes for a draft head compare at equal training time.

    python benchmarks/ablation.py --own CORPUS [--own CORPUS ...] --outside TEXT.txt --work DIR --prompts FILE
        [--minutes 6] [--seeds 0,1] [--rows NAME,...] [--limit 80] [--shape 16x5x4] [--jobs 1] [--threads 2]
        [--out results/NAME]

--own are corpus folders of earlier runs of `eyas train`, --outside is text the target did not write: see
`outside_text.py`.

Equal time is counted in steps: first every recipe's pace is measured alone on the machine, then each is trained for as
many steps as it would do in --minutes, so that what else the machine does later changes no result. `--only-pace` stops
before training; paces are kept in DIR/paces.json. A run that is there already is not repeated. Every head is then
measured by `eyas eval` on prompts that no training saw. `--jobs 2 --threads 1` keeps two cores busier than one run on
both. Writes NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACE_STEPS, WARMUP_STEPS = 16, 6
EYAS = [sys.executable, "-m", "eyas.deployments.cli"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Args:
    texts: own generations, or outside text.
    options: of `eyas train KIND`.
    """

    name: str
    kind: str
    texts: str
    options: tuple[str, ...] = ()


RECIPES = (
    Recipe("hard-outside", "eagle3", "outside", ("--objective", "hard")),
    Recipe("distilled-outside", "eagle3", "outside"),
    Recipe("hard-own", "eagle3", "own", ("--objective", "hard")),
    Recipe("distilled-own", "eagle3", "own"),
    Recipe("ttt-1", "eagle3", "own", ("--ttt-steps", "1")),
    Recipe("ttt-5", "eagle3", "own", ("--ttt-steps", "5")),
    Recipe("tree-aware", "eagle3", "own", ("--objective", "tree")),
    Recipe("answers-only", "eagle3", "own", ("--loss-rows", "answers")),
    Recipe("large-batches", "eagle3", "own", ("--batch-tokens", "3000")),
    Recipe("two-layers", "eagle3", "own", ("--layers", "2")),
    Recipe("medusa", "medusa", "own", ("--num-heads", "5")),
    Recipe("eagle-1", "eagle", "own"),
    Recipe("mtp", "mtp", "own"),
)


@dataclass(frozen=True, slots=True)
class Ablation:
    """Where the texts are, and where the runs go."""

    own: list[Path]
    outside: Path
    work: Path
    threads: int

    def train(self, recipe: Recipe, steps: int, seed: int, folder: Path) -> None:
        """Train one head into `folder / "head"`; does nothing if it is there."""
        if (folder / "head" / "config.json").exists():
            return
        corpus = self.own if recipe.texts == "own" else [self.work / "outside" / "texts"]
        places = [part for path in corpus for part in ("--corpus", str(path))]
        run("train", recipe.kind, *recipe.options, *places, "--steps", str(steps), "--seed", str(seed),
            "--threads", str(self.threads), "--validate-every", str(steps), "--skip-calibration",
            "--work-dir", str(folder),
            "--out", str(folder / "head"))  # fmt: skip

    def measure(self, recipe: Recipe, seed: int, steps: int, evaluation: tuple[str, ...]) -> dict[str, Any]:
        """Train a head and let `eyas eval` measure it, unless that was done; its report."""
        folder = self.work / f"{recipe.name}-{seed}"
        self.train(recipe, steps, seed, folder)
        report = folder / "eval.json"
        if not report.exists():
            run("eval", str(folder / "head"), *evaluation, "--threads", str(self.threads), "--json", str(report))
        figures: dict[str, Any] = json.loads(report.read_text())
        return figures

    def record_outside(self) -> None:
        """Record the target's states at the outside text once, for all rows that train on it."""
        folder = self.work / "outside"
        if not (folder / "head" / "config.json").exists():
            run("train", "eagle3", "--corpus", str(self.outside), "--steps", "1", "--threads", str(self.threads),
                "--skip-calibration", "--work-dir", str(folder), "--out", str(folder / "head"))  # fmt: skip

    def pace(self, recipe: Recipe) -> float:
        """Seconds of a step, the median after a warm-up; the machine should do nothing else."""
        folder = self.work / "pace" / recipe.name
        self.train(recipe, PACE_STEPS, 0, folder)
        lines = (folder / "log.jsonl").read_text().splitlines()
        elapsed = [json.loads(line)["elapsed_s"] for line in lines][WARMUP_STEPS:]
        return statistics.median(after - before for before, after in pairwise(elapsed))


def run(*command: str) -> None:
    """Run an `eyas` command; its own bars are shown."""
    Console(stderr=True).print("[dim]eyas", " ".join(command), soft_wrap=True)
    subprocess.run([*EYAS, *command], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=Path, action="append", required=True)
    parser.add_argument("--outside", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, at the pace measured")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--rows", default=",".join(recipe.name for recipe in RECIPES))
    parser.add_argument("--shape", default="16x5x4", help="of the tree; a chain of its depth is measured, too")
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; paces are measured one at a time")
    parser.add_argument("--only-pace", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ablation")
    args = parser.parse_args()
    names = args.rows.split(",")
    unknown = set(names) - {recipe.name for recipe in RECIPES}
    if unknown:
        parser.error(f"--rows: there is no {sorted(unknown)[0]}; choose from {[recipe.name for recipe in RECIPES]}")
    recipes = [recipe for recipe in RECIPES if recipe.name in names]
    ablation = Ablation(args.own, args.outside, args.work, args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    ablation.record_outside()
    paces = measured_paces(ablation, recipes)
    if args.only_pace:
        return
    _, depth, _ = args.shape.split("x")
    shapes = [args.shape, f"{int(depth) + 1}x{depth}x1"]
    evaluation = (
        "--prompts", str(args.prompts), "--limit", str(args.limit), "--shapes", ",".join(shapes), "--batch", "8",
        "--skip-probe",
    )  # fmt: skip
    runs = [
        (recipe, int(seed), max(1, round(60 * args.minutes / paces[recipe.name])))
        for seed in args.seeds.split(",")
        for recipe in recipes
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        reports = list(pool.map(lambda run: ablation.measure(*run, evaluation), runs))
    rows = []
    for (recipe, seed, steps), figures in zip(runs, reports, strict=True):
        by_shape = {shape["shape"]: shape for shape in figures["heads"][0]["shapes"]}
        rows.append({
            "recipe": recipe.name, "seed": seed, "steps": steps, "pace_s": paces[recipe.name],
            "tree": by_shape[shapes[0]]["acceptance_length"], "chain": by_shape[shapes[1]]["acceptance_length"],
        })  # fmt: skip
    machine, settings = reports[0]["machine"], reports[0]["settings"]
    summary = {
        "minutes": args.minutes, "shapes": shapes, "limit": args.limit, "machine": machine, "settings": settings,
        "rows": rows,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    show(summary, recipes)
    draw(summary, recipes, args.out.with_suffix(".png"))


def measured_paces(ablation: Ablation, recipes: list[Recipe]) -> dict[str, float]:
    """Seconds of a step by recipe; those measured before are read from the file."""
    file = ablation.work / "paces.json"
    paces: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    for recipe in recipes:
        if recipe.name not in paces:
            paces[recipe.name] = ablation.pace(recipe)
            file.write_text(json.dumps(paces, indent=1) + "\n")
    return paces


def show(summary: dict[str, Any], recipes: list[Recipe]) -> None:
    """Print a row for every recipe, a column for every seed."""
    tree, chain = summary["shapes"]
    seeds = sorted({row["seed"] for row in summary["rows"]})
    table = Table(
        title=f"tokens per verify step after {summary['minutes']:g} min of training; tree {tree}, chain {chain}"
    )
    for column in (
        "recipe",
        "steps",
        "s/step",
        *(f"{kind}, seed {seed}" for kind in ("tree", "chain") for seed in seeds),
    ):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for recipe in recipes:
        rows = sorted((row for row in summary["rows"] if row["recipe"] == recipe.name), key=lambda row: row["seed"])
        figures = [f"{row[kind]:.3f}" for kind in ("tree", "chain") for row in rows]
        table.add_row(recipe.name, str(rows[0]["steps"]), f"{rows[0]['pace_s']:.2f}", *figures)
    Console(width=140).print(table)


def draw(summary: dict[str, Any], recipes: list[Recipe], file: Path) -> None:
    """Bars of the seeds' means, with every seed as a dot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.42 * len(recipes) + 1.4), layout="constrained")
    axes = figure.subplots()
    for offset, kind, color in ((-0.2, "tree", "#4477aa"), (0.2, "chain", "#ccbb44")):
        for place, recipe in enumerate(recipes):
            values = [row[kind] for row in summary["rows"] if row["recipe"] == recipe.name]
            label = (
                {"tree": summary["shapes"][0], "chain": f"chain {summary['shapes'][1]}"}[kind] if place == 0 else None
            )
            axes.barh(place + offset, statistics.mean(values), 0.38, color=color, label=label)
            axes.plot(values, [place + offset] * len(values), "o", color="black", markersize=3)
    axes.set_yticks(range(len(recipes)), [recipe.name for recipe in recipes])
    axes.invert_yaxis()
    axes.set(xlabel=f"tokens per verify step after {summary['minutes']:g} minutes of training", xlim=(1.0, None))
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
