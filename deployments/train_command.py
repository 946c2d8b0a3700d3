"""`eyas train KIND`: gets a corpus, trains a draft head on it, saves it."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eyas.deployments.candidates_command import add_candidates_parser
from eyas.deployments.corpus_options import add_corpus_options, prepare_corpus, stop_token, text_length
from eyas.deployments.ignored_options import refuse_ignored
from eyas.deployments.option_names import options_named
from eyas.deployments.rank_options import add_rank_options, check_ranks, run_ranks
from eyas.deployments.run_folders import held, require_folder, require_new
from eyas.deployments.train_job import TrainJob, TrainResult
from eyas.deployments.train_options import add_train_options, training_config
from eyas.models.catalog import resolve_target
from eyas.models.config import DecoderConfig
from eyas.training.eagle3_method import check_layers
from eyas.training.export import draw_curve
from eyas.training.methods import KINDS
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import LOG_FILE
from eyas.training.validation import WIDTH

_CURVE_FILE = "training-curve.png"
_NAMES = {"eagle3": "an EAGLE-3", "eagle": "an EAGLE-1", "medusa": "a Medusa", "mtp": "an MTP"}


def add_train_parser(subparsers: Any) -> None:
    """Add `train` with a command for every kind of head to an `argparse` subparsers object."""
    train = subparsers.add_parser("train", help="train a draft head for a target")
    kinds = train.add_subparsers(dest="kind", required=True)
    for kind in KINDS:
        parser = kinds.add_parser(
            kind,
            help=f"{_NAMES[kind]} head, on a corpus the target writes itself",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add_train_options(parser, kind)
        add_corpus_options(parser)
        add_rank_options(parser)
        parser.set_defaults(run=run_train)
    add_candidates_parser(kinds)


def run_train(args: argparse.Namespace) -> int:
    """Carry out `eyas train KIND`; run again with the same arguments, it goes on where it was interrupted."""
    check_ranks(args)
    console = Console(stderr=True)
    target_folder = resolve_target(args.target)
    target = DecoderConfig.from_folder(target_folder)
    max_length = text_length(args, target)
    with options_named(args):
        config = training_config(args, target.vocab_size, max_length)
        check_layers(config.num_layers, target)
    refuse_ignored(args)
    require_folder("--out", args.out)
    require_new(args.out, args.work_dir)
    with held(args.work_dir):
        return _train(args, config, target_folder, target, console)


def _train(
    args: argparse.Namespace, config: TrainingConfig, target_folder: Path, target: DecoderConfig, console: Console
) -> int:
    corpus_folders = prepare_corpus(args, target_folder, target, console, torch.device(args.device))
    job = TrainJob(
        config=config,
        target=str(target_folder.resolve()) if Path(args.target).exists() else args.target,
        corpus_folders=tuple(folder.resolve() for folder in corpus_folders),
        work_folder=args.work_dir.resolve(),
        out=args.out.resolve(),
        stop_token_id=stop_token(args, target_folder),
        options=args,
    )
    if args.ray_workers is not None:
        console.print(f"{args.ray_workers} workers of Ray Train; every step is a line of {args.work_dir / LOG_FILE}")
    with options_named(args):
        result: TrainResult = run_ranks(args, job.run)
    Console().print(result_table(result))
    console.print(f"head written to {args.out}")
    if find_spec("matplotlib") is None:
        console.print("no training curve: it needs matplotlib, pip install 'eyas[train]'", highlight=False)
    else:
        draw_curve(args.work_dir / LOG_FILE, args.work_dir / _CURVE_FILE)
        console.print(f"training curve written to {args.work_dir / _CURVE_FILE}")
    return 0


def result_table(result: TrainResult) -> Table:
    """What a head can do, by drafted level, on texts it was not trained on."""
    validation = result.validation
    speed = (
        f"{validation.chain_length:.2f} tokens per verify step of a chain of {len(validation.recall)}, up to "
        f"{validation.tree_length:.2f} of a tree {WIDTH} wide"
    )
    steps = f"{result.num_steps} steps in {result.elapsed_s / 60:.0f} min, the best head after {result.best_step}"
    table = Table(title=f"{steps}; {speed}")
    table.add_column("level")
    for rank in range(1, len(validation.recall[0]) + 1):
        table.add_column(f"in top {rank}", justify="right")
    for level, shares in enumerate(validation.recall, start=1):
        table.add_row(str(level), *(f"{share:.1%}" for share in shares))
    return table
