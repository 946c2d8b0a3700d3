from __future__ import annotations

import argparse
import re

import pytest

from eyas.deployments.option_names import options_named
from eyas.deployments.train_command import add_train_parser
from eyas.deployments.train_options import training_config
from eyas.training.methods import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("num_steps", "--steps"),
        ("max_minutes", "--minutes"),
        ("tokens_per_batch", "--batch-tokens"),
        ("learning_rate", "--lr"),
        ("matrix_rate", "--matrix-lr"),
        ("num_levels", {"medusa": "--num-heads"}.get),
        ("draft_vocab_size", {"eagle3": "--draft-vocab"}.get),
        ("validate_every", "--validate-every"),
        ("checkpoint_minutes", "--checkpoint-minutes"),
        ("seed", "--seed"),
        ("level_decay", "--level-decay"),
    ],
)
def test_errors_name_an_option_of_the_command(kind: str, field: str, option: object) -> None:
    """Catches an error about a name that the user cannot find in --help."""
    others = {"num_levels": "--ttt-steps", "draft_vocab_size": "--loss-vocab"}
    name = option if isinstance(option, str) else option(kind, others[field])  # type: ignore[operator]
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    arguments = parser.parse_args(["train", kind, "--out", "head", name, "-1"])
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: must .*-1"), options_named(arguments):
        training_config(arguments, 100, 50)


def test_other_errors_stay() -> None:
    """Catches an error that loses its place, its cause or its words."""
    with pytest.raises(ValueError, match=r"^a text: without a setting$"), options_named(argparse.Namespace(kind="mtp")):
        raise ValueError("a text: without a setting")
