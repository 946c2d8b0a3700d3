"""The report of `eyas eval` for people: tables of shapes, depths, ranks, probabilities and categories."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDTH = 140  # where standard output is no terminal


def print_tables(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a report of `evaluation.evaluate`."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH)
    settings, prompts = report["settings"], report["prompts"]
    console.print(
        f"{', '.join(head['name'] for head in report['heads'])} for {settings['model']}, {settings['dtype']}, "
        f"temperature {settings['temperature']:g}, {prompts['num_prompts']} prompts of {prompts['file']}, at most "
        f"{settings['max_tokens']} tokens each",
        markup=False,
        highlight=False,
    )
    for table in (
        _shapes(report), _depths(report), _ranks(report), *_calibrations(report), *_categories(report),
    ):  # fmt: skip
        title, table.title = table.title, None  # as a line of its own it may be wider than the table
        console.print("", title, table, sep="\n", highlight=False)


def _rows(report: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Each shape of each head, heads side by side, and its labels; the head is no label where there is one alone."""
    heads = report["heads"]
    for shapes in zip(*(head["shapes"] for head in heads), strict=True):
        for head, shape in zip(heads, shapes, strict=True):
            yield [shape["shape"], escape(head["name"])] if len(heads) > 1 else [shape["shape"]], shape


def _table(title: str, report: dict[str, Any], *columns: str) -> Table:
    """A table with a row for every shape of every head."""
    table = Table(title=title)
    for label in ("shape", "head")[: len(next(_rows(report))[0])]:
        table.add_column(label, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _side_by_side(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """What stands in the columns of one table: the shapes of the only head, or the heads in one shape."""
    heads = report["heads"]
    if len(heads) == 1:
        yield "", {shape["shape"]: shape for shape in heads[0]["shapes"]}
        return
    for shapes in zip(*(head["shapes"] for head in heads), strict=True):
        columns = {escape(head["name"]): shape for head, shape in zip(heads, shapes, strict=True)}
        yield f", {shapes[0]['shape']}", columns


def _transposed(title: str, labels: list[str], columns: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    for label in labels:
        table.add_column(label)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _shapes(report: dict[str, Any]) -> Table:
    machine, threads = report["machine"], report["settings"]["threads"]
    where = machine["gpu"] if report["settings"]["device"] == "cuda" else f"{machine['cpu']}, {threads} threads"
    table = _table(
        f"By shape (nodes x depth x width). Milliseconds are medians of a step on this machine: {where}", report, "",
        "tokens per step", "steps", "tokens", "calibration error", "with prior", "draft ms", "verify ms",
    )  # fmt: skip
    for labels, shape in _rows(report):
        table.add_row(
            *labels,
            "chain" if shape["is_chain"] else "tree",
            f"{shape['acceptance_length']:.3f}",
            str(shape["num_steps"]),
            str(shape["num_tokens"]),
            _number(shape["calibration"]["raw"]["expected_calibration_error"], ".3f"),
            _number((shape["calibration"]["used"] or {}).get("expected_calibration_error"), ".3f"),
            _number(shape["draft_ms"], ".1f"),
            _number(shape["verify_ms"], ".1f"),
        )
    return table


def _depths(report: dict[str, Any]) -> Table:
    most = max(len(shape["by_depth"]) for _, shape in _rows(report))
    table = _table(
        "Accepted by depth, where the parent was and a token was proposed (in brackets: of all steps)", report,
        *(f"depth {depth}" for depth in range(1, most + 1)),
    )  # fmt: skip
    for labels, shape in _rows(report):
        cells = (f"{_number(each['acceptance'], '.1%')} ({each['reached']:.1%})" for each in shape["by_depth"])
        table.add_row(*labels, *cells)
    return table


def _ranks(report: dict[str, Any]) -> Table:
    most = max((len(ranks) for _, shape in _rows(report) for ranks in shape["by_rank"]), default=0)
    table = _table(
        "Accepted by depth and by rank among siblings (in brackets: times proposed)", report, "depth",
        *(f"rank {rank}" for rank in range(1, most + 1)),
    )  # fmt: skip
    for labels, shape in _rows(report):
        table.add_section()
        for depth, ranks in enumerate(shape["by_rank"], start=1):
            cells = (f"{_number(each['acceptance'], '.1%')} ({each['num_proposed']})" for each in ranks)
            table.add_row(*labels, str(depth), *cells)
    return table


def _calibrations(report: dict[str, Any]) -> Iterator[Table]:
    titles = {"raw": "the head's probability", "used": "the probability of the head's acceptance prior"}
    for (kind, by_what), (title_end, shapes) in product(titles.items(), list(_side_by_side(report))):
        columns = {name: shape["calibration"][kind] for name, shape in shapes.items() if shape["calibration"][kind]}
        if not columns:
            continue
        table = _transposed(f"Accepted by {by_what} (in brackets: edges){title_end}", ["probability"], columns)
        for buckets in zip(*(curve["buckets"] for curve in columns.values()), strict=True):
            cells = (f"{_number(bucket['acceptance'], '.1%')} ({bucket['num_edges']})" for bucket in buckets)
            table.add_row(f"{buckets[0]['low']:.2f} to {buckets[0]['high']:.2f}", *cells)
        yield table


def _categories(report: dict[str, Any]) -> Iterator[Table]:
    for title_end, columns in _side_by_side(report):
        title = f"Tokens per step by category (in brackets: tokens){title_end}"
        table = _transposed(title, ["category", "prompts"], columns)
        for category, first in next(iter(columns.values()))["by_category"].items():
            figures = (shape["by_category"][category] for shape in columns.values())
            cells = (f"{each['acceptance_length']:.3f} ({each['num_tokens']})" for each in figures)
            table.add_row(escape(category), str(first["num_prompts"]), *cells)
        yield table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
