"""What `eyas train KIND` can be told."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from eyas.models.catalog import DEFAULT_TARGET
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
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=60.0, help="train for about this long")
    length.add_argument("--steps", type=int, help="train on this many batches instead")
    if kind == "medusa":
        parser.add_argument("--num-heads", dest="num_levels", type=int, default=_MEDUSA_HEADS, help="levels it drafts")
        parser.add_argument(
            "--own-projection", action="store_true", help="train an output projection for every head, too"
        )
    else:
        parser.add_argument(
            "--ttt-steps",
            dest="num_levels",
            type=int,
            default=defaults.num_levels,
            help="steps of the training-time test",
        )
    vocabulary = ("--draft-vocab", "ids the head can propose")
    if kind != "eagle3":
        vocabulary = ("--loss-vocab", "ids the loss is taken over; the head can propose all")
    parser.add_argument(
        vocabulary[0], dest="draft_vocab", type=int, default=defaults.draft_vocab_size, help=vocabulary[1]
    )
    parser.add_argument("--batch-tokens", type=int, default=defaults.tokens_per_batch, help="rows of a batch")
    parser.add_argument(
        "--lr", type=float, default=defaults.learning_rate, help="highest rate of AdamW (norms, output projections)"
    )
    matrix_rate = _MATRIX_RATES.get(kind, defaults.matrix_rate)
    parser.add_argument("--matrix-lr", type=float, default=matrix_rate, help="highest rate of Muon (the rest)")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, the new weights and the batch order")
    parser.add_argument("--threads", type=int, default=num_cpus, help="threads to train with")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=defaults.dtype, help="what is computed in")
