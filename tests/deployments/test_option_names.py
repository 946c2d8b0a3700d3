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
    "option",
    [
        "--steps",
        "--minutes",
        "--batch-tokens",
        "--lr",
        "--matrix-lr",
        "--loss-vocab",
        "--validate-every",
        "--checkpoint-minutes",
        "--seed",
        "--level-decay",
    ],
)
def test_errors_name_an_option_of_the_command(kind: str, option: str) -> None:
    """Catches an error about a name that the user cannot find in --help."""
    check(kind, option)


def test_options_of_one_kind() -> None:
    """Catches the same setting called as another kind calls it."""
    check("medusa", "--num-heads")
    check("mtp", "--ttt-steps")
    check("eagle3", "--draft-vocab")
    check("eagle3", "--layers")


def check(kind: str, name: str) -> None:
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    arguments = parser.parse_args(["train", kind, "--out", "head", name, "-1"])
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: must .*-1"), options_named(arguments):
        training_config(arguments, 100, 50)


def test_other_errors_stay() -> None:
    """Catches an error that loses its place, its cause or its words."""
    with pytest.raises(ValueError, match=r"^a text: without a setting$"), options_named(argparse.Namespace(kind="mtp")):
        raise ValueError("a text: without a setting")
