"""What `eyas eval` refuses, before it loads or runs anything for long."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eyas.deployments import commands, eval_command
from eyas.deployments.eval_command import add_eval_parser

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.deployments.conftest import Following


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "abc"}))
    return file


def run(following: Following, prompts: Path, *arguments: str, heads: list[Path] | None = None) -> int:
    parser = argparse.ArgumentParser()
    add_eval_parser(parser.add_subparsers())
    base = ["--prompts", str(prompts), "--target", str(following.target_folder), "--threads", "1", "--skip-probe"]
    parsed = parser.parse_args(["eval", *map(str, heads or [following.head_folder]), *base, *arguments])
    status: int = parsed.run(parsed)
    return status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "16x5"], "shape: '16x5' has 2 parts"),
        (["--shapes", "8x4x4,8xax4"], "shape: '8xax4': depth is 'a'"),
        (["--shapes", "99x2x2"], "shape: '99x2x2': node_budget: 99 nodes need"),
        (["--shapes", "8x4x4,1x0x1"], "shape: '1x0x1': nodes is 1, which drafts nothing"),
        (["--shapes", "8x4x4, 8x4x4"], "shape: '8x4x4' is given twice"),
        (["--shapes", "8x70x1"], "shape: 8x70x1: draft_depth: Input should be less"),
        (["--shapes", "8x2x300"], "shape: 8x2x300: width is 300, but .* can propose only 260 tokens"),
        (["--temperature", "-1"], "temperature must be between 0 and 100, got -1"),
        (["--temperature", "nan"], "temperature must be between 0 and 100, got nan"),
        (["--seed", "-1"], "seed must be between 0"),
        (["--names", "a,b"], "--names: 2 names for 1 heads"),
        (["--names", ""], "--names: '' is no name"),
        (["--json", "/nowhere/at/all.json"], "--json: /nowhere/at/all.json cannot be written"),
        (["--png", "/"], "--png: / cannot be written"),
    ],
)
def test_options_that_cannot_work(following: Following, prompts: Path, arguments: list[str], message: str) -> None:
    """Catches a run that fails after an hour, or for a reason that does not name the option."""
    with pytest.raises(ValueError, match=message):
        run(following, prompts, *arguments)


def test_two_heads_need_two_names(following: Following, prompts: Path) -> None:
    """Catches two rows of the same name, of which nobody knows which is which."""
    with pytest.raises(ValueError, match="--names: 'model-.*' is no name of one head alone"):
        run(following, prompts, heads=[following.head_folder, following.head_folder])


def test_heads_that_cannot_be_used(
    following: Following, tiny_models: TinyModels, prompts: Path, tmp_path: Path
) -> None:
    """Catches a missing head, a folder that holds none, and a head of another target found out in mid-run."""
    with pytest.raises(ValueError, match="head: .*nothing-here is neither"):
        run(following, prompts, heads=[tmp_path / "nothing-here"])
    with pytest.raises(ValueError, match="is not a draft head"):
        run(following, prompts, heads=[tmp_path])
    other = tiny_models.head(tiny_models.target(hidden_size=48, vocab_size=260, num_hidden_layers=6))
    with pytest.raises(ValueError, match=r"hidden_size|is \[|expected"):
        run(following, prompts, heads=[other])


def test_prompts_that_cannot_be_used(following: Following, prompts: Path) -> None:
    """Catches errors of the reader lost on the way, and a target that is none."""
    prompts.write_text('{"category": 3, "prompt": "a"}')
    with pytest.raises(ValueError, match="line 1: has the category 3"):
        run(following, prompts)
    with pytest.raises(ValueError, match="model: .* is neither"):
        run(following, prompts, "--target", str(prompts))


@pytest.mark.parametrize(("option", "value"), [("--limit", "0"), ("--batch", "-2"), ("--max-tokens", "x")])
def test_counts_must_be_positive(
    following: Following, prompts: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a limit of 0 that means none, and a refusal that names a field instead of the option."""
    with pytest.raises(SystemExit):
        run(following, prompts, option, value)
    assert f"argument {option}: must be a whole number of at least 1, got {value}" in capsys.readouterr().err


def test_a_picture_needs_its_library(
    following: Following, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the library found missing at the end of the run."""
    monkeypatch.setattr(eval_command, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--png: a picture needs matplotlib"):
        run(following, prompts, "--png", str(tmp_path / "out.png"))


def test_refusals_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that is not wired into `eyas`, or answers with a stack trace."""
    monkeypatch.setattr(sys, "argv", ["eyas", "eval", "nothing-here", "--prompts", "none.jsonl", "--shapes", "8"])
    with pytest.raises(SystemExit) as exit_:
        commands.run()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("eyas: shape: '8' has 1 parts")
