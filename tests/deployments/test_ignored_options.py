from __future__ import annotations

import argparse

import pytest

from eyas.deployments.ignored_options import refuse_ignored
from eyas.deployments.train_command import add_train_parser


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    return parser.parse_args(["train", *arguments, "--out", "head"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--corpus", "a.txt", "--corpus-tokens", "5"], "--corpus-tokens: is for texts the target writes"),
        (["--corpus", "a.txt", "--greedy-share", "0"], "--greedy-share: is for texts the target writes"),
        (["--corpus", "a.txt", "--answer-temperature", "1"], "--answer-temperature: is for texts the target"),
        (["--corpus", "a.txt", "--answer-tokens", "9"], "--answer-tokens: is for texts the target writes"),
        (["--corpus", "a.txt", "--user-tokens", "9"], "--user-tokens: is for texts the target writes"),
        (["--corpus", "a.txt", "--opener-share", "0"], "--opener-share: is for texts the target writes"),
        (["--corpus", "a.txt", "--writers", "99"], "--writers: is for texts the target writes"),
        (["--prompts", "a.jsonl", "--opener-share", "0"], "--opener-share: is for user turns the target invents"),
        (["--prompts", "a.jsonl", "--window", "9"], "--window: is for plain text"),
        (["--corpus", "a.jsonl", "--window", "9"], "--window: is for plain text"),
        (["--tree-share", "0.9"], "--tree-share: is for --objective tree"),
        (["--objective", "hard", "--tree-width", "9"], "--tree-width: is for --objective tree"),
    ],
)
def test_what_would_be_ignored_is_refused(options: list[str], message: str) -> None:
    """Catches an option without effect, whose user believes to have trained something else."""
    with pytest.raises(ValueError, match=f"^{message}"):
        refuse_ignored(parse("eagle3", *options))


@pytest.mark.parametrize(
    "arguments",
    [
        ["mtp"],
        ["mtp", "--corpus", "a.txt", "--window", "9"],
        ["mtp", "--corpus", "a.jsonl", "--corpus", "folder", "--window", "9"],
        ["mtp", "--prompts", "a.jsonl", "--answer-tokens", "9", "--writers", "99"],
        ["mtp", "--opener-share", "0", "--corpus-tokens", "9", "--objective", "tree", "--tree-width", "9"],
        ["candidates", "--head", "h", "--rank", "4", "--corpus", "a.txt"],
    ],
)
def test_what_has_an_effect_is_taken(arguments: list[str]) -> None:
    """Catches defaults that are taken for given options, and a refusal of what is used."""
    refuse_ignored(parse(*arguments))
