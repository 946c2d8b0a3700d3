"""`eyas eval HEAD … --prompts FILE`: how well draft heads are accepted, as tables, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic

from eyas.deployments.option_types import positive
from eyas.deployments.run_folders import require_file
from eyas.deployments.scheduler import TreeShape
from eyas.deployments.settings import EngineSettings
from eyas.deployments.shapes import parse_shape, shape_name, shape_settings
from eyas.models.catalog import DEFAULT_HEAD, DEFAULT_TARGET
from eyas.workers.sampling import SamplingParams

_DEFAULT_SHAPES = "16x5x4,8x4x4,6x5x1"


def add_eval_parser(subparsers: Any) -> None:
    """Add `eval` to an `argparse` subparsers object."""
    parser = subparsers.add_parser("eval", help="how well draft heads are accepted, by depth, rank and category")
    parser.add_argument("heads", nargs="+", metavar="HEAD", help=f"folder or file of a head, or {DEFAULT_HEAD}")
    parser.add_argument("--names", help="what to call the heads, separated by commas [the paths' last parts]")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns, messages or prompt")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="the model the heads are meant for [%(default)s]")
    parser.add_argument(
        "--shapes", default=_DEFAULT_SHAPES, help="nodes x depth x width, width 1 being a chain [%(default)s]"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="prompt i is sampled with seed + i [%(default)s]")
    parser.add_argument("--limit", type=positive, default=None, help="use only the first so many prompts")
    parser.add_argument("--max-tokens", type=positive, default=128, help="of an answer [%(default)s]")
    parser.add_argument("--batch", type=positive, default=1, help="requests decoded together [%(default)s]")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="[%(default)s]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="[%(default)s]")
    parser.add_argument(
        "--threads", type=positive, default=min(os.cpu_count() or 1, 8), help="of the CPU [%(default)s]"
    )
    parser.add_argument("--num-candidates", type=positive, default=None, help="see `eyas serve`")
    parser.add_argument("--raw-scores", action="store_true", help="grow trees without the heads' acceptance priors")
    parser.add_argument("--skip-probe", action="store_true", help="trust the heads' files on which states they read")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT.json", help="write all figures")
    parser.add_argument("--png", type=Path, default=None, metavar="OUT.png", help="write a picture (needs matplotlib)")
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Carry out `eyas eval`."""
    from eyas.deployments.evaluation import Answering, EvaluatedHead, evaluate

    _check_outputs(args.json, args.png)
    SamplingParams(args.temperature, 1.0, args.seed)
    shapes = _shapes(args.shapes)
    heads = [
        EvaluatedHead(name, [(shape, _settings(args, head, shape)) for shape in shapes])
        for name, head in zip(_names(args.heads, args.names), args.heads, strict=True)
    ]
    answering = Answering(args.prompts, args.limit, args.max_tokens, args.temperature, args.seed)
    report = evaluate(heads, answering)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.png is not None:
        from eyas.deployments.evaluation_figure import draw_evaluation

        draw_evaluation(report, args.png)
    from eyas.deployments.evaluation_tables import print_tables

    print_tables(report)
    return 0


def _check_outputs(json_file: Path | None, png_file: Path | None) -> None:
    """Refuse now what would be lost at the end."""
    require_file("--json", json_file)
    require_file("--png", png_file)
    if png_file is not None and find_spec("matplotlib") is None:
        raise ValueError("--png: a picture needs matplotlib: pip install 'eyas[train]'; or leave the option out")


def _shapes(text: str) -> list[TreeShape]:
    shapes = []
    for part in text.split(","):
        shape = parse_shape(part)
        if shape.node_budget == 1:
            raise ValueError(f"shape: {part.strip()!r}: nodes is 1, which drafts nothing; give at least 2")
        if shape in shapes:
            raise ValueError(f"shape: {part.strip()!r} is given twice")
        shapes.append(shape)
    return shapes


def _names(heads: list[str], names: str | None) -> list[str]:
    given = [Path(head).expanduser().name or head for head in heads] if names is None else names.split(",")
    if len(given) != len(heads):
        raise ValueError(f"--names: {len(given)} names for {len(heads)} heads; give one for each, separated by commas")
    repeated = [name for name, count in Counter(given).items() if count > 1 or not name]
    if repeated:
        raise ValueError(f"--names: {repeated[0]!r} is no name of one head alone; give every head its own")
    return given


def _settings(args: argparse.Namespace, head: str, shape: TreeShape) -> EngineSettings:
    try:
        return EngineSettings.model_validate(
            {
                **shape_settings(shape),
                "model": args.target,
                "head": head,
                "dtype": args.dtype,
                "device": args.device,
                "max_batch_size": args.batch,
                "threads_per_worker": args.threads,
                "num_candidates": args.num_candidates,
                "acceptance_prior": not args.raw_scores,
                "probe": not args.skip_probe,
                "cuda_graphs": False,  # recorded drafts cannot be observed
            }
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"shape: {shape_name(shape)}: {first['loc'][0]}: {first['msg']}") from None
