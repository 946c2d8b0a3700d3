from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.deployments.train_command import add_train_parser
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.candidate_head import FrozenHead

if TYPE_CHECKING:
    from tests.conftest import TinyModels

LENGTHS, PROMPT_TOKENS = [12, 9, 14, 10], 3
DRAFT_VOCAB, HIDDEN, RANK, NUM_CANDIDATES = 40, 32, 5, 6


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    return parser.parse_args(["train", "candidates", *arguments])


@pytest.fixture
def target(tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None]) -> Path:
    folder = tiny_models.target(num_hidden_layers=6, vocab_size=264)
    save_chat_tokenizer(folder)
    return folder


@pytest.fixture
def arguments(target: Path, tiny_models: TinyModels, tmp_path: Path) -> list[str]:
    """For a head and a corpus of random texts with random states, as wide as `train` records them."""
    config = DecoderConfig.from_folder(target)
    layers = list(config.default_aux_layers())
    head = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB, eagle_aux_hidden_state_layer_ids=layers,
                            eagle_config={})  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    width = (len(layers) + 1) * config.hidden_size  # and the last state
    tensors = {
        "token_ids": torch.randint(3, config.vocab_size, (sum(LENGTHS),), generator=generator),
        "features": torch.randn(sum(LENGTHS), width, generator=generator).to(torch.bfloat16),
        "lengths": torch.tensor(LENGTHS),
        "prompt_lengths": torch.full((len(LENGTHS),), PROMPT_TOKENS),
    }
    (tmp_path / "corpus").mkdir()
    save_file(tensors, tmp_path / "corpus" / "shard-00000.safetensors")
    places = {"target": target, "head": head, "corpus": tmp_path / "corpus", "out": tmp_path / "out",
              "work-dir": tmp_path / "work"}  # fmt: skip
    return [part for name, place in places.items() for part in (f"--{name}", str(place))]


def run(*arguments: str) -> int:
    args = parse(*arguments, "--rank", str(RANK), "--threads", "1", "--dtype", "float32")
    status: int = args.run(args)
    return status


def test_the_command_writes_a_head_that_loads(
    arguments: list[str], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches options that do not reach the trainer, a head the server cannot load, and a table of other figures."""
    assert run(*arguments, "--steps", "2", "--num-candidates", str(NUM_CANDIDATES), "--ttt-steps", "2") == 0
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    head = load_head(tmp_path / "out", weights, torch.float32, torch.device("cpu"))
    assert isinstance(head, Eagle3Head)
    assert head.projection is not None
    assert head.projection.down.weight.shape == (RANK, HIDDEN)
    assert head.max_candidates == NUM_CANDIDATES
    table = capsys.readouterr().out
    assert f"rank {RANK}, {NUM_CANDIDATES} candidates, 2 steps" in table
    assert [line.split()[1] for line in table.splitlines() if line.startswith("│") and "%" in line][:2] == ["1", "2"]
    full = 4 * DRAFT_VOCAB * HIDDEN
    for num_nodes in (1, 4):
        read = 4 * (RANK * (HIDDEN + DRAFT_VOCAB) + num_nodes * NUM_CANDIDATES * HIDDEN)
        assert f"│ {full:,} │ {read:,}".replace(" ", "") in table.replace(" ", "")


def test_states_may_be_computed(arguments: list[str], tmp_path: Path) -> None:
    """Catches texts alone that are taken for a corpus of states, or a target that is not asked for them."""
    file = tmp_path / "corpus" / "shard-00000.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "features"}, file)
    limits = ["--steps", "1", "--num-candidates", "8"]
    with pytest.raises(ValueError, match="--corpus: .* without the target's states; use --states online"):
        run(*arguments, *limits)
    assert run(*arguments, *limits, "--states", "online") == 0
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-candidates", "3"], "--num-candidates: 3 is fewer than the 4 tokens"),
        (["--corpus", "{tmp}/none"], "--corpus: .*none"),
        (["--out", "{tmp}"], "exists and is not an empty folder"),
        (["--num-candidates", "40"], "--num-candidates: must be below the 40 tokens"),
        (["--head", "{tmp}/none"], "head: .*none does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    arguments: list[str], more: list[str], message: str, tmp_path: Path
) -> None:
    """Catches a run that fails late, and a mistyped corpus taken for an empty one."""
    more = [part.format(tmp=tmp_path) for part in more]
    with pytest.raises(ValueError, match=message):
        run(*arguments, "--num-candidates", "8", "--steps", "1", *more)
    assert not (tmp_path / "work").exists()


def test_a_device_that_is_not_there_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an option that is dropped silently, or a trace from within torch after the corpus was written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device: torch sees no CUDA device on this machine; use --device cpu"):
        run(*arguments, "--num-candidates", "8", "--steps", "1", "--device", "cuda")
    assert not (tmp_path / "work").exists()


def test_all_is_computed_on_the_device(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a head, a target or a writer that stays on the CPU."""
    devices: dict[str, torch.device] = {}

    class Stopped(Exception):
        pass

    def head(path: Path, target_folder: Path, dtype: torch.dtype, device: torch.device) -> FrozenHead:
        devices["head"] = device
        return FrozenHead(path, target_folder, dtype)

    def prepare(args: object, folder: Path, target: DecoderConfig, console: object, device: torch.device) -> list[Path]:
        devices["writer"] = device
        return []

    def states(args: object, folder: Path, device: torch.device) -> None:
        devices["target"] = device
        raise Stopped

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, stand_in in (("FrozenHead", head), ("prepare_corpus", prepare), ("target_states", states)):
        monkeypatch.setattr(f"eyas.deployments.candidates_command.{name}", stand_in)
    with pytest.raises(Stopped):
        run(*arguments, "--num-candidates", "8", "--steps", "1", "--device", "cuda", "--states", "online")
    assert devices == dict.fromkeys(("head", "writer", "target"), torch.device("cuda"))


def test_lengths_are_told_in_steps_or_minutes() -> None:
    """Catches minutes that are ignored, or that stand beside a number of steps."""
    required = ["--head", "h", "--rank", "8", "--out", "o"]
    assert (parse(*required, "--steps", "7").steps, parse(*required).steps) == (7, None)
    assert parse(*required, "--minutes", "2").minutes == 2.0
