from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.deployments.train_command import add_train_parser
from eyas.deployments.train_options import training_config
from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.methods import KINDS
from eyas.training.objective_options import OBJECTIVES, ObjectiveOptions
from eyas.training.states import recorded_layers
from eyas.training.training_log import read_log

if TYPE_CHECKING:
    from tests.conftest import TinyModels

LENGTHS, PROMPT_TOKENS = [12, 9, 14, 10], 3


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    return parser.parse_args(["train", *arguments])


@pytest.fixture
def target(tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None]) -> Path:
    folder = tiny_models.target(num_hidden_layers=6, vocab_size=264)
    save_chat_tokenizer(folder)
    return folder


@pytest.fixture
def corpus_folder(target: Path, tmp_path: Path) -> Path:
    """Random texts with random states, as wide as `train` records them."""
    config = DecoderConfig.from_folder(target)
    generator = torch.Generator().manual_seed(0)
    width = len(recorded_layers(config)) * config.hidden_size
    tensors = {
        "token_ids": torch.randint(3, config.vocab_size, (sum(LENGTHS),), generator=generator),
        "features": torch.randn(sum(LENGTHS), width, generator=generator).to(torch.bfloat16),
        "lengths": torch.tensor(LENGTHS),
        "prompt_lengths": torch.full((len(LENGTHS),), PROMPT_TOKENS),
    }
    (tmp_path / "corpus").mkdir()
    save_file(tensors, tmp_path / "corpus" / "shard-00000.safetensors")
    return tmp_path / "corpus"


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_on_a_corpus_that_is_there(
    kind: str, objective: str, target: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    """Catches a kind that cannot use the corpus of another, an objective that the command cannot train by, and a head
    that the server cannot load."""
    places = ["--out", str(tmp_path / "head"), "--work-dir", str(tmp_path / "work"), "--corpus", str(corpus_folder)]
    how = ["--objective", objective, "--loss-rows", "all", "--feature-noise", "0.1", "--validate-every", "1"]
    limits = ["--steps", "2", "--threads", "1", "--dtype", "float32"]
    arguments = parse(kind, "--target", str(target), *places, *how, *limits)
    before = sorted(corpus_folder.iterdir())
    assert arguments.run(arguments) == 0
    assert sorted(corpus_folder.iterdir()) == before
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    head = load_head(tmp_path / "head", weights, torch.float32, torch.device("cpu"))
    assert head.max_depth == (4 if kind == "medusa" else None)
    assert (tmp_path / "work" / "training-curve.png").exists()
    assert len((tmp_path / "work" / "validation.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "is_fitted"),
    [(["--validation-share", "0.5"], True), (["--validation-share", "0.5", "--skip-calibration"], False), ([], False)],
)
def test_a_trained_head_carries_its_acceptance_prior(
    options: list[str], is_fitted: bool, target: Path, corpus_folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches a prior that is fitted but not written, one nobody asked for, and a trace where one text is too few."""
    places = ["--out", str(tmp_path / "head"), "--work-dir", str(tmp_path / "work"), "--corpus", str(corpus_folder)]
    arguments = parse("eagle3", "--target", str(target), *places, "--steps", "1", "--threads", "1", *options)
    assert arguments.run(arguments) == 0
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert ("acceptance_prior" in config) == is_fitted
    shown = capsys.readouterr().err
    assert ("calibration error" in shown) == is_fitted
    assert ("too little to calibrate" in shown) == (not options)


def test_states_of_chats_recorded_or_not(target: Path, tmp_path: Path) -> None:
    """Catches an option that does not reach the trainer, and losses that depend on when the states were computed."""
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(6)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats))
    losses = {}
    for states in ("recorded", "online"):
        places = ["--out", str(tmp_path / f"head-{states}"), "--work-dir", str(tmp_path / states), "--states", states]
        texts = ["--corpus", str(tmp_path / "chats.jsonl"), "--batch-tokens", "100"]
        options = ["--steps", "3", "--threads", "1", "--dtype", "float32"]
        arguments = parse("eagle3", "--target", str(target), *places, *texts, *options)
        assert arguments.run(arguments) == 0
        losses[states] = [record.loss for record in read_log(tmp_path / states / "log.jsonl")]
    assert losses["online"] == pytest.approx(losses["recorded"], rel=1e-2)
    assert losses["online"] != losses["recorded"]  # recorded states are rounded


def test_a_target_of_bytes(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches a step that still asks for a tokenizer or an end token."""
    target = tiny_models.target(num_hidden_layers=6, vocab_size=256)
    (tmp_path / "a.txt").write_text("A text of bytes, häufig kurz.\n" * 30)
    places = ["--out", str(tmp_path / "head"), "--work-dir", str(tmp_path / "work")]
    texts = ["--corpus", str(tmp_path / "a.txt"), "--text-encoding", "bytes", "--window", "50"]
    arguments = parse("mtp", "--target", str(target), *places, *texts, "--steps", "2", "--threads", "1")
    assert arguments.run(arguments) == 0
    assert len(read_log(tmp_path / "work" / "log.jsonl")) == 2


def test_a_new_head_does_not_replace_another(target: Path, corpus_folder: Path, tmp_path: Path) -> None:
    """Catches a check of --out that comes after training, and one that refuses the run that wrote there."""
    out, work = tmp_path / "head", tmp_path / "work"
    places = ["--target", str(target), "--out", str(out), "--corpus", str(corpus_folder)]
    arguments = parse("medusa", *places, "--work-dir", str(work), "--steps", "1", "--threads", "1")
    assert arguments.run(arguments) == 0
    assert arguments.run(arguments) == 0
    other = parse("mtp", *places, "--work-dir", str(tmp_path / "other"), "--steps", "1")
    with pytest.raises(ValueError, match="--out: .* is not empty"):
        other.run(other)
    assert not (tmp_path / "other").exists()


def test_no_matplotlib_no_curve(
    target: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches a trace at the end of a run where a picture cannot be drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("eyas.deployments.train_command.find_spec", lambda name: None)
    places = ["--out", str(tmp_path / "head"), "--work-dir", str(tmp_path / "work"), "--corpus", str(corpus_folder)]
    arguments = parse("medusa", "--target", str(target), *places, "--steps", "1", "--threads", "1")
    assert arguments.run(arguments) == 0
    assert "no training curve" in capsys.readouterr().err


def test_a_corpus_that_is_empty_is_refused(target: Path, tmp_path: Path) -> None:
    """Catches a mistyped folder into which a new corpus would be written for an hour."""
    arguments = parse("eagle", "--target", str(target), "--out", str(tmp_path / "head"), "--corpus", str(tmp_path))
    with pytest.raises(ValueError, match="--corpus: .* holds no shard"):
        arguments.run(arguments)


def test_more_layers_than_the_target_has_are_refused_first(target: Path, tmp_path: Path) -> None:
    """Catches a corpus written for an hour before the head turns out impossible, and an error without the option."""
    work = tmp_path / "work"
    arguments = parse("eagle3", "--target", str(target), "--out", str(tmp_path / "head"), "--work-dir", str(work),
                      "--layers", "99")  # fmt: skip
    with pytest.raises(ValueError, match=r"^--layers: the target has \d+, the head cannot begin as 99$"):
        arguments.run(arguments)
    assert not work.exists()


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["medusa"], "num_levels", 4),
        (["medusa", "--num-heads", "2"], "num_levels", 2),
        (["medusa", "--own-projection"], "own_projection", True),
        (["eagle"], "num_levels", 3),
        (["mtp", "--loss-vocab", "100"], "loss_vocab", 100),
        (["eagle3", "--draft-vocab", "100"], "draft_vocab", 100),
        (["eagle3", "--layers", "2"], "num_layers", 2),
        (["mtp"], "work_dir", Path("runs/mtp")),
        (["eagle"], "matrix_lr", 3e-3),
        (["mtp"], "corpus", None),
        (["mtp", "--corpus", "a", "--corpus", "b"], "corpus", [Path("a"), Path("b")]),
        (["eagle", "--states", "online"], "states", "online"),
    ],
)
def test_options_of_the_kinds(arguments: list[str], name: str, value: Any) -> None:
    """Catches options of one kind that are lost under another's name, and work folders that two kinds share."""
    assert getattr(parse(*arguments, "--out", "head"), name) == value


@pytest.mark.parametrize("kind", KINDS)
def test_options_reach_the_run(kind: str) -> None:
    """Catches an option that is read and then forgotten."""
    given = {
        "--objective": ("objective", "tree"),
        "--tree-width": ("tree_width", 7),
        "--tree-share": ("tree_share", 0.3),
        "--loss-rows": ("loss_rows", "answers"),
        "--level-decay": ("level_decay", 0.9),
        "--feature-noise": ("feature_noise", 0.05),
        "--batch-tokens": ("tokens_per_batch", 123),
        "--lr": ("learning_rate", 0.01),
        "--matrix-lr": ("matrix_rate", 0.02),
        "--matrix-decay": ("matrix_decay", 0.3),
        "--validate-every": ("validate_every", 11),
        "--validation-levels": ("validation_levels", 6),
        "--patience": ("patience", 2),
        "--seed": ("seed", 9),
        "--steps": ("num_steps", 17),
        "--dtype": ("dtype", "float32"),
    }
    plain = training_config(parse(kind, "--out", "head"), 1000, 77)
    changed = [text for option, (_, value) in given.items() for text in (option, str(value))]
    config = training_config(parse(kind, "--out", "head", *changed), 1000, 77)
    for name, value in given.values():
        assert getattr(config, name) == value
        assert getattr(plain, name) != value
    assert plain.objective_options == ObjectiveOptions(loss_rows="all")
    assert (plain.max_minutes, plain.draft_vocab_size, plain.max_length) == (60.0, 1000, 77)
    assert config.max_minutes is None
