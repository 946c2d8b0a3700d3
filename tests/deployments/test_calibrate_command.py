"""`eyas calibrate` on tiny models and a random corpus."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.deployments.calibrate_command import add_calibrate_parser
from eyas.deployments.head_commands import add_convert_parser
from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head, open_head
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

LENGTHS, PROMPT_TOKENS = [12, 9, 14, 10, 13, 11], 3


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_calibrate_parser(commands)
    add_convert_parser(commands)
    args = parser.parse_args([str(argument) for argument in arguments])
    status: int = args.run(args)
    return status


@pytest.fixture
def target(tiny_models: TinyModels) -> Path:
    return tiny_models.target(num_hidden_layers=6)


@pytest.fixture
def head(tiny_models: TinyModels, target: Path) -> Path:
    aux_layers = DecoderConfig.from_folder(target).default_aux_layers()
    return tiny_models.head(target, eagle_config={"eagle_aux_hidden_state_layer_ids": list(aux_layers)})


@pytest.fixture
def corpus(target: Path, tmp_path: Path) -> Path:
    """Random texts with random states, as wide as `train` records them."""
    config = DecoderConfig.from_folder(target)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "token_ids": torch.randint(3, config.vocab_size, (sum(LENGTHS),), generator=generator),
        "features": torch.randn(sum(LENGTHS), 4 * config.hidden_size, generator=generator).to(torch.bfloat16),
        "lengths": torch.tensor(LENGTHS),
        "prompt_lengths": torch.full((len(LENGTHS),), PROMPT_TOKENS),
    }
    (tmp_path / "corpus").mkdir()
    save_file(tensors, tmp_path / "corpus" / "shard-00000.safetensors")
    return tmp_path / "corpus"


@pytest.mark.parametrize("name", ["out", "out.heads"])
def test_a_copy_with_the_prior_is_written(name: str, target: Path, corpus: Path, head: Path, tmp_path: Path) -> None:
    """Catches a head changed in place, a copy that lost weights or the prior, and figures that are not written."""
    before = (head / "config.json").read_text()
    out, report = tmp_path / name, tmp_path / "report.json"
    places = ("--target", target, "--corpus", corpus, "--out", out, "--report", report, "--text-encoding", "bytes")
    assert run("calibrate", head, *places, "--validation-share", 0.7, "--dtype", "float32", "--width", 4) == 0
    assert (head / "config.json").read_text() == before
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    ours, theirs = (load_head(path, weights, torch.float32, torch.device("cpu")) for path in (out, head))
    assert ours.acceptance_prior is not None
    assert theirs.acceptance_prior is None
    for name_, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name_], tensor, atol=0, rtol=0)
    figures = json.loads(report.read_text())
    assert set(figures) == {"greedy", "sampled"}
    assert figures["greedy"]["num_samples"] > 0
    converted = tmp_path / "again.heads"
    assert run("convert", out, converted, "--target", target) == 0
    assert open_head(converted).config["acceptance_prior"] == ours.acceptance_prior.as_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation-share", 1), "--validation-share: must be between 0 and 1, got 1.0"),
        (("--depth", 0), "--depth, --width: must be at least 1"),
        (("--corpus", "nowhere"), "--corpus: nowhere holds no shard of a corpus"),
        (("--report", "nowhere/report.json"), "--report: nowhere/report.json cannot be written"),
        (("--out", "."), r"--out: \. exists and is not an empty folder"),
        (("--validation-share", 0.1), "--validation-share: 0.1 of --corpus is 1 conversation, at least 2"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: tuple[object, ...], message: str, target: Path, corpus: Path, head: Path, tmp_path: Path
) -> None:
    """Catches a minute of work before a mistyped option is seen, and errors that do not name it."""
    with pytest.raises(ValueError, match=message):
        run(
            "calibrate",
            head,
            "--target",
            target,
            "--corpus",
            corpus,
            "--out",
            tmp_path / "out",
            "--text-encoding",
            "bytes",
            *arguments,
        )


def test_states_that_a_corpus_lacks_are_computed(target: Path, corpus: Path, head: Path, tmp_path: Path) -> None:
    """Catches a corpus of `--states online` that could be trained on but not calibrated with."""
    file = corpus / "shard-00000.safetensors"
    tensors = load_file(file)
    del tensors["features"]
    save_file(tensors, file)
    places = ("--target", target, "--corpus", corpus, "--out", tmp_path / "out", "--text-encoding", "bytes")
    assert run("calibrate", head, *places, "--validation-share", 0.7, "--dtype", "float32") == 0
    assert "acceptance_prior" in open_head(tmp_path / "out").config
