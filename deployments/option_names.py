"""How the settings of training are called on the command line, so that errors name what a user can change."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager

_OPTIONS = {
    "num_steps": "steps",
    "max_minutes": "minutes",
    "tokens_per_batch": "batch-tokens",
    "learning_rate": "lr",
    "matrix_rate": "matrix-lr",
    "num_levels": "ttt-steps",
    "num_layers": "layers",
    "draft_vocab_size": "draft-vocab",
    "loss_vocab_size": "loss-vocab",
}
_FIELD = re.compile(r"[a-z_]+(?=:)")


@contextmanager
def options_named(args: argparse.Namespace) -> Iterator[None]:
    """Raise a `ValueError` that begins with the name of a setting again, with its option in the setting's place."""
    try:
        yield
    except ValueError as error:
        found = _FIELD.match(str(error))
        if found is None:
            raise
        raise ValueError(_option(found[0], args.kind) + str(error)[found.end() :]) from error


def _option(field: str, kind: str) -> str:
    if field == "num_levels" and kind == "medusa":
        return "--num-heads"
    return "--" + _OPTIONS.get(field, field.replace("_", "-"))
