"""The report of `eyas eval` as a picture: shapes, ranks, calibration and categories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by nearly everyone.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
_GREY = "#777777"
_LINE_STYLES = ("-", "--", ":", "-.")
_MOST_RANKS = 6
_MOST_LEVEL_LABELS = 12  # numbers over bars stand upright where there are more
_FEW = 20  # events below which a share says little


def draw_evaluation(report: dict[str, Any], file: Path) -> None:
    """Write a report of `evaluation.evaluate` as a PNG.

    Raises:
        RuntimeError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("the picture needs matplotlib: pip install 'eyas[train]'") from None
    heads = report["heads"]
    shown = [max(head["shapes"], key=lambda shape: shape["num_nodes"]) for head in heads]
    names = [head["name"] for head in heads]
    settings, prompts = report["settings"], report["prompts"]
    figure = Figure(figsize=(13, 9), layout="constrained")
    (shapes_axes, rank_axes), (calibration_axes, category_axes) = figure.subplots(2, 2)
    _draw_shapes(shapes_axes, heads)
    _draw_ranks(rank_axes, shown, names)
    _draw_calibration(calibration_axes, shown, names)
    if len(heads) == 1:  # its shapes side by side
        _draw_categories(category_axes, heads[0]["shapes"], [shape["shape"] for shape in heads[0]["shapes"]], "")
    else:
        _draw_categories(category_axes, shown, names, f", {_shape_names(shown)}")
    figure.suptitle(
        f"{', '.join(names)} for {settings['model']}: {settings['dtype']}, temperature {settings['temperature']:g}, "
        f"{prompts['num_prompts']} prompts, at most {settings['max_tokens']} tokens each"
    )
    figure.savefig(file, dpi=120, format="png")


def _draw_shapes(axes: Axes, heads: list[dict[str, Any]]) -> None:
    """Tokens per step, a group of bars for every shape; chains are hatched."""
    labels = [f"{shape['shape']}\n{'chain' if shape['is_chain'] else 'tree'}" for shape in heads[0]["shapes"]]
    heights = [[shape["acceptance_length"] for shape in head["shapes"]] for head in heads]
    bars = _grouped_bars(axes, labels, heights, "{:.2f}")
    for group in bars:
        for bar, shape in zip(group, heads[0]["shapes"], strict=True):
            bar.set_hatch("//" if shape["is_chain"] else "")
    axes.axhline(1.0, color=_GREY, linewidth=1, linestyle=":")
    axes.set_title("Acceptance length by shape (nodes x depth x width)")
    axes.set_ylabel("tokens per verify step")
    _add_legend(axes, [head["name"] for head in heads], bars)


def _draw_ranks(axes: Axes, shown: list[dict[str, Any]], names: list[str]) -> None:
    """Acceptance by depth, a line for every rank and one for all ranks together; heads differ in line style."""
    num_ranks = min(max((len(ranks) for shape in shown for ranks in shape["by_rank"]), default=0), _MOST_RANKS)
    for style, shape in zip(_repeated(_LINE_STYLES, len(shown)), shown, strict=True):
        _draw_shares(axes, shape["by_depth"], "black", style, "s")
        for rank in range(1, num_ranks + 1):
            of_rank = [
                {"depth": depth, **ranks[rank - 1]}
                for depth, ranks in enumerate(shape["by_rank"], start=1)
                if len(ranks) >= rank
            ]
            _draw_shares(axes, of_rank, _COLOURS[rank - 1], style, "o")
    axes.set_title(f"Acceptance by depth and rank, {_shape_names(shown)} (hollow: under {_FEW} times)")
    axes.set_xlabel("depth")
    axes.set_ylabel("accepted, where the parent was")
    axes.set_xticks(range(1, max((len(shape["by_depth"]) for shape in shown), default=0) + 1))
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    colours = {"any rank": "black"} | {f"rank {rank}": _COLOURS[rank - 1] for rank in range(1, num_ranks + 1)}
    for label, colour in colours.items():
        axes.plot([], [], color=colour, label=label)
    if len(names) > 1:
        for style, name in zip(_repeated(_LINE_STYLES, len(names)), names, strict=True):
            axes.plot([], [], color=_GREY, linestyle=style, label=name)
    axes.legend(fontsize="small", loc="upper right", ncols=2 if len(names) > 1 else 1)


def _draw_shares(axes: Axes, points: list[dict[str, Any]], colour: str, style: str, marker: str) -> None:
    """Shares over depth; markers are hollow where few events stand behind them."""
    points = [point for point in points if point["acceptance"] is not None]
    depths, shares = ([point[name] for point in points] for name in ("depth", "acceptance"))
    axes.plot(depths, shares, color=colour, linestyle=style, marker=marker, clip_on=False)
    few = [place for place, point in enumerate(points) if point["num_proposed"] < _FEW]
    axes.scatter(
        [depths[place] for place in few], [shares[place] for place in few], marker=marker, facecolors="white",
        edgecolors=colour, zorder=3, clip_on=False,
    )  # fmt: skip


def _draw_calibration(axes: Axes, shown: list[dict[str, Any]], names: list[str]) -> None:
    """Reliability diagram; a marker's area grows with its edges, what an acceptance prior says is dashed."""
    axes.plot([0, 1], [0, 1], color=_GREY, linestyle=":", label="calibrated")
    for colour, shape, name in zip(_repeated(_COLOURS, len(shown)), shown, names, strict=True):
        raw, used = shape["calibration"]["raw"], shape["calibration"]["used"]
        _draw_curve(axes, raw, colour, "-", name)
        if used is not None:
            _draw_curve(axes, used, colour, "--", f"{name} with its prior")
        if len(shown) == 1 and used is None:
            for bucket in raw["buckets"]:
                if bucket["num_edges"]:
                    axes.annotate(
                        str(bucket["num_edges"]), (bucket["mean_probability"], bucket["acceptance"]), xytext=(7, -11),
                        textcoords="offset points", fontsize="x-small",
                    )  # fmt: skip
    axes.set_title(f"Calibration (areas: edges), {_shape_names(shown)}")
    axes.set_xlabel("probability of a token given its parent")
    axes.set_ylabel("accepted, where the parent was")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")


def _draw_curve(axes: Axes, curve: dict[str, Any], colour: str, style: str, name: str) -> None:
    buckets = [bucket for bucket in curve["buckets"] if bucket["num_edges"]]
    if not buckets:
        return
    xs, ys, counts = ([each[key] for each in buckets] for key in ("mean_probability", "acceptance", "num_edges"))
    label = f"{name}, error {curve['expected_calibration_error']:.3f}"
    axes.plot(xs, ys, color=colour, linestyle=style, label=label)
    axes.scatter(xs, ys, s=[15 + 200 * count / max(counts) for count in counts], color=colour, alpha=0.6)


def _draw_categories(axes: Axes, shown: list[dict[str, Any]], names: list[str], title_end: str) -> None:
    categories = list(shown[0]["by_category"])
    labels = [f"{category}\n({shown[0]['by_category'][category]['num_prompts']})" for category in categories]
    heights = [[shape["by_category"][category]["acceptance_length"] for category in categories] for shape in shown]
    bars = _grouped_bars(axes, labels, heights, "{:.2f}")
    axes.axhline(1.0, color=_GREY, linewidth=1, linestyle=":")
    axes.set_title(f"Acceptance length by category (prompts){title_end}")
    axes.set_ylabel("tokens per verify step")
    if len(categories) > 5:
        axes.tick_params(axis="x", labelsize="small", rotation=20)
    _add_legend(axes, names, bars)


def _grouped_bars(axes: Axes, labels: list[str], heights: list[list[float]], form: str) -> list[Any]:
    """One group of bars for every label, one bar in it for every list of heights."""
    width = 0.8 / len(heights)
    bars = []
    for index, (colour, values) in enumerate(zip(_repeated(_COLOURS, len(heights)), heights, strict=True)):
        places = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(labels))]
        group_bars = axes.bar(places, values, width * 0.92, color=colour, edgecolor="white")
        is_crowded = len(labels) * len(heights) > _MOST_LEVEL_LABELS
        axes.bar_label(group_bars, fmt=form, fontsize="small", padding=3, rotation=90 if is_crowded else 0)
        bars.append(group_bars)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-max(0.6, 1.6 - len(labels) / 2), len(labels) - 1 + max(0.6, 1.6 - len(labels) / 2))
    axes.margins(y=0.25)
    return bars


def _add_legend(axes: Axes, names: list[str], bars: list[Any]) -> None:
    if len(names) > 1:
        axes.legend(bars, names, fontsize="small", ncols=len(names))


def _shape_names(shown: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(shape["shape"] for shape in shown))


def _repeated(values: Sequence[str], count: int) -> list[str]:
    return [values[index % len(values)] for index in range(count)]
