"""What `eyas train KIND` can be told."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from eyas.deployments.option_types import positive
from eyas.models.catalog import DEFAULT_TARGET
from eyas.training.objective_options import LOSS_ROWS, OBJECTIVES
from eyas.training.run_config import DTYPES, RunConfig
from eyas.training.training_config import TrainingConfig

_MEDUSA_HEADS = 4
_MATRIX_RATES = {"eagle": 3e-3}  # nothing norms what its attention reads: at the rate of the others its states run away


def add_train_options(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add the options of a kind of head."""
    num_cpus = os.cpu_count() or 1
    defaults = TrainingConfig(kind, num_steps=1)
    parser.add_argument("--target", default=DEFAULT_TARGET, help="target model: a Hugging Face folder or a known name")
    parser.add_argument("--out", type=Path, required=True, help="folder the head is written to")
    parser.add_argument("--work-dir", type=Path, default=Path("runs") / kind, help="log and state to resume from")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, the new weights, the batch order and noise")
    parser.add_argument(
        "--threads", type=positive, default=num_cpus, help="threads to train with, of all ranks together"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default=defaults.dtype, help="what is computed in")
    parser.add_argument(
        "--skip-calibration",
        action="store_true",
        help="write the head without an acceptance prior, see `eyas calibrate`",
    )
    _add_objective(parser, kind, defaults)
    _add_schedule(parser, kind, defaults)


def _add_objective(parser: argparse.ArgumentParser, kind: str, defaults: TrainingConfig) -> None:
    """What is compared with what, and how much each part counts."""
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=defaults.objective,
        help="distill: the target's distribution; hard: the token the text holds next; "
        "tree: distill, and the target's favourite among the first candidates",
    )
    group.add_argument(
        "--tree-width", type=int, default=defaults.tree_width, help="of --objective tree: candidates of a node"
    )
    group.add_argument(
        "--tree-share",
        type=float,
        default=defaults.tree_share,
        help="of --objective tree: share of the favourite, from 0 to 1; the rest is distill",
    )
    group.add_argument(
        "--loss-rows", choices=LOSS_ROWS, default=defaults.loss_rows, help="rows of a conversation to learn from"
    )
    if kind == "medusa":
        group.add_argument("--num-heads", dest="num_levels", type=int, default=_MEDUSA_HEADS, help="levels it drafts")
        group.add_argument(
            "--own-projection", action="store_true", help="train an output projection for every head, too"
        )
    else:
        group.add_argument(
            "--ttt-steps",
            dest="num_levels",
            type=int,
            default=defaults.num_levels,
            help="steps of the training-time test",
        )
    group.add_argument(
        "--level-decay", type=float, default=defaults.level_decay, help="weight of level i, from 0: this to the power i"
    )
    if kind == "eagle3":
        group.add_argument(
            "--layers",
            dest="num_layers",
            type=int,
            default=defaults.num_layers,
            help="decoder layers of the head, which begin as the target's last ones",
        )
        group.add_argument(
            "--draft-vocab",
            type=int,
            default=defaults.draft_vocab_size,
            help="ids the head can propose, the most frequent ones of the answers",
        )
    group.add_argument(
        "--loss-vocab",
        type=int,
        default=defaults.loss_vocab_size,
        help="ids in the loss of every batch, besides those that occur in it; a sample stands for the rest",
    )
    group.add_argument(
        "--feature-noise",
        type=float,
        default=defaults.feature_noise,
        help="standard deviation of uniform noise on what the head reads, as a share of its root mean square",
    )


def _add_schedule(parser: argparse.ArgumentParser, kind: str, defaults: TrainingConfig) -> None:
    """How long and how fast to train, and when to look."""
    group = parser.add_argument_group("schedule")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=60.0, help="train for about this long")
    length.add_argument("--steps", type=int, help="train on this many batches instead")
    add_checkpoint_option(group)
    group.add_argument("--batch-tokens", type=int, default=defaults.tokens_per_batch, help="rows of a batch")
    group.add_argument(
        "--lr", type=float, default=defaults.learning_rate, help="highest rate of AdamW (norms, output projections)"
    )
    matrix_rate = _MATRIX_RATES.get(kind, defaults.matrix_rate)
    group.add_argument("--matrix-lr", type=float, default=matrix_rate, help="highest rate of Muon (the rest)")
    group.add_argument(
        "--matrix-decay", type=float, default=defaults.matrix_decay, help="weight decay of what Muon moves"
    )
    group.add_argument("--validate-every", type=int, help="steps between validations; left out, a twentieth of the run")
    group.add_argument(
        "--validation-share",
        type=float,
        default=defaults.validation_share,
        help="of the conversations, the last ones, which are not trained on",
    )
    group.add_argument(
        "--validation-levels",
        type=int,
        default=defaults.validation_levels,
        help="levels to validate; a Medusa head has no more than it trains",
    )
    group.add_argument(
        "--patience",
        type=int,
        default=defaults.patience,
        help="stop after this many validations without a better head; 0: never",
    )


def add_checkpoint_option(group: argparse._ActionsContainer) -> None:
    """Add `--checkpoint-minutes`, which a resumed run may change."""
    group.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=RunConfig(num_steps=1).checkpoint_minutes,
        help="between the states to resume from that are written",
    )


def training_config(args: argparse.Namespace, vocab_size: int, max_length: int) -> TrainingConfig:
    """What the options say of training, for a target of `vocab_size` tokens and texts of up to `max_length`."""
    return TrainingConfig(
        kind=args.kind,
        num_steps=args.steps,
        max_minutes=None if args.steps is not None else args.minutes,
        num_layers=getattr(args, "num_layers", 1),
        draft_vocab_size=min(getattr(args, "draft_vocab", vocab_size), vocab_size),
        loss_vocab_size=min(args.loss_vocab, vocab_size),
        tokens_per_batch=args.batch_tokens,
        max_length=max_length,
        num_levels=args.num_levels,
        level_decay=args.level_decay,
        has_own_projection=getattr(args, "own_projection", False),
        objective=args.objective,
        tree_width=args.tree_width,
        tree_share=args.tree_share,
        loss_rows=args.loss_rows,
        feature_noise=args.feature_noise,
        learning_rate=args.lr,
        matrix_rate=args.matrix_lr,
        matrix_decay=args.matrix_decay,
        validation_share=args.validation_share,
        validation_levels=args.validation_levels,
        validate_every=args.validate_every,
        checkpoint_minutes=args.checkpoint_minutes,
        patience=args.patience,
        dtype=args.dtype,
        seed=args.seed,
    )
