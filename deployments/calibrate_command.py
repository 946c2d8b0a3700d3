"""`eyas calibrate HEAD`: fits the acceptance prior of a head that exists, on a corpus, and writes a copy with it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.deployments.option_types import positive
from eyas.deployments.run_folders import require_file, require_folder
from eyas.models.catalog import DEFAULT_HEAD, DEFAULT_TARGET, resolve_target, shipped_head

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.training.prior_fit import PriorFit, RegimeReport


def add_calibrate_parser(subparsers: Any) -> None:
    """Add `calibrate` to an `argparse` subparsers object."""
    parser = subparsers.add_parser("calibrate", help="fit what a head's scores are worth, on a corpus of its target")
    parser.add_argument("head", help=f"folder or file of a head, or {DEFAULT_HEAD}")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="the model the head is meant for [%(default)s]")
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder of a corpus of the target, see `eyas train`; it is only read"
    )
    parser.add_argument(
        "--text-encoding", choices=["tokens", "bytes"], default="tokens",
        help="bytes for a byte-level target, which has no tokenizer [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="copy with the prior: a new folder, or a .heads file")
    parser.add_argument("--report", type=Path, help="write the figures as JSON")
    parser.add_argument(
        "--validation-share",
        type=float,
        default=0.02,
        help="last part of the corpus that is read; the head must not have been trained on it [%(default)s]",
    )
    parser.add_argument("--depth", type=int, default=5, help="levels with curves of their own [%(default)s]")
    parser.add_argument("--width", type=int, default=8, help="candidates with curves of their own [%(default)s]")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="served in [%(default)s]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="computed on [%(default)s]")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads [%(default)s]")
    parser.set_defaults(run=run_calibrate)


def run_calibrate(args: argparse.Namespace) -> int:
    """Carry out `eyas calibrate`.

    Raises:
        ValueError: naming the option and the remedy.
    """
    import torch
    from rich.console import Console

    from eyas.deployments.corpus_options import stop_token, target_states
    from eyas.deployments.head_commands import write_head
    from eyas.deployments.rank_options import check_device
    from eyas.models.config import DecoderConfig
    from eyas.models.head_loading import load_head, open_head
    from eyas.models.head_writing import with_prior
    from eyas.models.target_weights import TargetWeights
    from eyas.training.dataset import Corpus, make_batches
    from eyas.training.initialisation import TargetOutput
    from eyas.training.prior_fit import fit_prior
    from eyas.training.prior_samples import FeatureReader
    from eyas.training.run_config import DTYPES
    from eyas.training.shard import holds_states, read_shard, shard_files
    from eyas.training.training_config import TrainingConfig

    if min(args.depth, args.width) < 1:
        raise ValueError("--depth, --width: must be at least 1")
    if not 0.0 < args.validation_share < 1.0:
        raise ValueError(f"--validation-share: must be between 0 and 1, got {args.validation_share}")
    check_device(args.device)
    files = shard_files(args.corpus)
    if not files:
        raise ValueError(f"--corpus: {args.corpus} holds no shard of a corpus; `eyas train` writes one")
    if args.out.exists() and (args.out.is_file() or any(args.out.iterdir())):
        raise ValueError(f"--out: {args.out} exists and is not an empty folder; give another name")
    require_folder("--out", args.out.parent)
    require_file("--report", args.report)
    torch.set_num_threads(args.threads)
    folder, dtype, device = resolve_target(args.target), DTYPES[args.dtype], torch.device(args.device)
    target = DecoderConfig.from_folder(folder)
    source = open_head(shipped_head() if args.head == DEFAULT_HEAD else Path(args.head).expanduser())
    head = load_head(source.path, TargetWeights(folder, target), dtype, device)
    defaults = TrainingConfig("eagle3", num_steps=1)
    compute_states = None if all(holds_states(file) for file in files) else target_states(args, folder, device)
    max_length = min(defaults.max_length, target.max_positions)
    shards = [read_shard(file) for file in files]
    corpus = Corpus(shards, max_length, stop_token(args, folder), compute_states)
    _, validation = corpus.split(args.validation_share)
    if len(validation) < 2:
        raise ValueError(
            f"--validation-share: {args.validation_share} of --corpus is {len(validation)} conversation, at least 2 "
            "are needed, one to fit and one to judge; raise it, or give a larger --corpus"
        )
    ordered = sorted(validation, key=lambda item: item.length)
    batches = [corpus.batch(group) for group in make_batches(ordered, defaults.tokens_per_batch)]
    aux_layers = target.default_aux_layers()
    width, expected = batches[0].features.shape[1], (len(aux_layers) + 1) * target.hidden_size
    if width != expected:
        raise ValueError(
            f"--corpus: features are {width} wide, {aux_layers} and the last need {expected}; use a corpus of --target"
        )
    output = TargetOutput.load(folder, target, dtype, device)
    console = Console(stderr=True)
    with console.status(f"{len(validation)} conversations"):
        fit = fit_prior(head, FeatureReader(aux_layers, target.final_index, output), batches, args.depth, args.width)
    write_head(args.out, with_prior(source, fit.prior), folder)
    if args.report is not None:
        args.report.write_text(json.dumps({"greedy": asdict(fit.greedy), "sampled": asdict(fit.sampled)}, indent=1))
    Console().print(prior_table(fit))
    for regime, report in (("greedy", fit.greedy), ("sampled", fit.sampled)):
        if not report.is_kept:
            console.print(f"{regime}: calibrated scores are no better than the head's own here, so these are kept")
    console.print(f"head written to {args.out}")
    return 0


def prior_table(fit: PriorFit) -> Table:
    """What calibration does on the conversations that did not fit it."""
    from rich.table import Table

    def pair(values: tuple[float, float], digits: int) -> str:
        return " → ".join(f"{value:.{digits}f}" for value in values)

    def rows(report: RegimeReport) -> list[str]:
        shown = [pair(report.log_loss, 4), pair(report.calibration_error, 4)]
        return [*shown, *(pair(lengths, 2) for lengths in report.lengths.values()), "yes" if report.is_kept else "no"]

    table = Table(title="raw → calibrated, on conversations that did not fit it")
    for name in ("", "greedy", "sampled"):
        table.add_column(name, justify="right" if name else "left")
    shapes = [f"tokens per step, {shape}" for shape in fit.greedy.lengths]
    names = ["log-loss", "calibration error", *shapes, "kept"]
    for row in zip(names, rows(fit.greedy), rows(fit.sampled), strict=True):
        table.add_row(*row)
    return table
