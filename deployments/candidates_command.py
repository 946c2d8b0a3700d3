"""`eyas train candidates`: trains a low-rank candidate projection for a head that is trained already."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eyas.deployments.corpus_options import (
    ONLINE,
    add_corpus_options,
    prepare_corpus,
    stop_token,
    target_states,
    text_length,
)
from eyas.deployments.ignored_options import refuse_ignored
from eyas.deployments.option_names import options_named
from eyas.deployments.option_types import positive
from eyas.deployments.rank_options import add_device_option, check_device
from eyas.deployments.run_folders import held, require_folder
from eyas.deployments.train_options import add_checkpoint_option
from eyas.models.candidate_projection import DEFAULT_CANDIDATES, weights_read
from eyas.models.catalog import DEFAULT_HEAD, DEFAULT_TARGET, resolve_target, shipped_head
from eyas.models.config import DecoderConfig
from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_head import FrozenHead
from eyas.training.candidate_trainer import CandidateRecall, CandidateTrainer
from eyas.training.progress import TrainingProgress
from eyas.training.run_config import DTYPES
from eyas.training.validation import WIDTH

KIND = "candidates"


def add_candidates_parser(kinds: Any) -> None:
    """Add `candidates` to the subparsers of `eyas train`."""
    parser = kinds.add_parser(
        KIND,
        help="low-rank candidate projection for a head that is trained already",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    num_cpus = os.cpu_count() or 1
    defaults = CandidateConfig(num_steps=1, head="", rank=1, num_candidates=1)
    parser.add_argument("--target", default=DEFAULT_TARGET, help="target model: a Hugging Face folder or a known name")
    parser.add_argument("--head", required=True, help=f"EAGLE-1 or EAGLE-3 head: folder or file, or {DEFAULT_HEAD}")
    parser.add_argument("--rank", type=int, required=True, help="of the two factors")
    parser.add_argument(
        "--num-candidates", type=int, default=DEFAULT_CANDIDATES, help="tokens the factors find for exact scoring"
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder for the head with its factors")
    parser.add_argument("--work-dir", type=Path, default=Path("runs") / KIND, help="log and state to resume from")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=20.0, help="train for about this long")
    length.add_argument("--steps", type=int, help="train on this many batches instead")
    add_checkpoint_option(parser)
    parser.add_argument(
        "--ttt-steps", dest="num_levels", type=int, default=defaults.num_levels, help="steps of the training-time test"
    )
    parser.add_argument("--batch-tokens", type=int, default=defaults.tokens_per_batch, help="rows of a batch")
    parser.add_argument("--lr", type=float, default=defaults.learning_rate, help="highest rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus and the batch order")
    parser.add_argument("--threads", type=positive, default=num_cpus, help="threads to train with")
    parser.add_argument("--dtype", choices=list(DTYPES), default=defaults.dtype, help="what is computed in")
    add_device_option(parser)
    add_corpus_options(parser)
    parser.set_defaults(run=run_train_candidates)


def run_train_candidates(args: argparse.Namespace) -> int:
    """Carry out `eyas train candidates`; run again with the same arguments, it goes on where it was interrupted."""
    if args.num_candidates < WIDTH:
        raise ValueError(
            f"--num-candidates: {args.num_candidates} is fewer than the {WIDTH} tokens a node of the default tree has"
        )
    check_device(args.device)
    console, device = Console(stderr=True), torch.device(args.device)
    target_folder = resolve_target(args.target)
    target = DecoderConfig.from_folder(target_folder)
    path = shipped_head() if args.head == DEFAULT_HEAD else Path(args.head).expanduser()
    max_length = text_length(args, target)
    with options_named(args):
        config = CandidateConfig(
            head=str(path.resolve()),
            rank=args.rank,
            num_candidates=args.num_candidates,
            num_steps=args.steps,
            max_minutes=None if args.steps is not None else args.minutes,
            tokens_per_batch=args.batch_tokens,
            max_length=max_length,
            num_levels=args.num_levels,
            learning_rate=args.lr,
            checkpoint_minutes=args.checkpoint_minutes,
            dtype=args.dtype,
            seed=args.seed,
        )
    refuse_ignored(args)
    head = FrozenHead(path, target_folder, config.compute_dtype, device=device)
    with options_named(args):
        head.check(config)
    head.check_export(args.out)
    require_folder("--out", args.out)
    with held(args.work_dir):
        return _train(args, config, head, target_folder, target, console)


def _train(
    args: argparse.Namespace,
    config: CandidateConfig,
    head: FrozenHead,
    target_folder: Path,
    target: DecoderConfig,
    console: Console,
) -> int:
    device = torch.device(args.device)
    corpus_folders = prepare_corpus(args, target_folder, target, console, device)
    torch.set_num_threads(args.threads)
    compute_states = target_states(args, target_folder, device) if args.states == ONLINE else None
    stop_token_id = stop_token(args, target_folder)
    trainer = CandidateTrainer(config, head, corpus_folders, args.work_dir, stop_token_id, compute_states)
    with TrainingProgress(console, trainer.loop.step, measure="recall") as progress:
        after = trainer.run(progress)
    assert after is not None
    trainer.export(args.out)
    Console().print(recall_table(trainer, after))
    Console().print(cost_table(trainer))
    console.print(f"head written to {args.out}")
    if head.has_prior:
        console.print(
            "its acceptance prior was left out, since it is for scores over all tokens; fit one for the new head",
            soft_wrap=True,
        )
    return 0


def recall_table(trainer: CandidateTrainer, after: CandidateRecall) -> Table:
    """By level, on texts the factors were not trained on, what the truncated SVD found and what they find now."""
    config, before = trainer.config, trainer.before
    assert before is not None
    table = Table(title=f"rank {config.rank}, {config.num_candidates} candidates, {trainer.loop.step} steps")
    table.add_column("level")
    for name in ("recall, SVD alone", "recall, trained", "divergence, SVD alone", "divergence, trained"):
        table.add_column(name, justify="right")
    for level in range(config.num_levels):
        recalls = (f"{each.recall[level]:.2%}" for each in (before, after))
        divergences = (f"{each.divergence[level]:.3f}" for each in (before, after))
        table.add_row(str(level + 1), *recalls, *divergences)
    return table


def cost_table(trainer: CandidateTrainer) -> Table:
    """Bytes of output projection that one drafted level reads, at most: nodes may share candidates."""
    config = trainer.config
    output = trainer.head.output
    num_rows, hidden_size = output.shape
    table = Table(title="bytes of projection read by a drafted level")
    for name in ("nodes", "full", "with the factors", "share"):
        table.add_column(name, justify="right")
    num_bytes = output.element_size()
    full = output.numel() * num_bytes
    for num_nodes in (1, WIDTH):
        read = weights_read(num_rows, hidden_size, config.rank, config.num_candidates, num_nodes) * num_bytes
        table.add_row(str(num_nodes), f"{full:,}", f"{read:,}", f"{read / full:.1%}")
    return table
