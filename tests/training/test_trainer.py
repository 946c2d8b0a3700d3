from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.training.dataset import ComputeStates
from eyas.training.shard import Shard, save_shard
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import StepRecord, read_log
from eyas.training.validation import Validation

STOP = 2
CONFIG = TrainingConfig(
    kind="eagle3",
    num_steps=12,
    draft_vocab_size=32,
    tokens_per_batch=30,
    learning_rate=3e-3,
    warmup_steps=2,
    validation_share=0.2,
    checkpoint_minutes=60.0,
    dtype="float32",
)


class Recorder:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.planned: list[int | None] = []

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        self.records.append(record)
        self.planned.append(num_steps)

    def on_validation(self, step: int, validation: Validation) -> None:
        self.validation = validation

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]


@pytest.fixture
def corpus_folder(shard: Shard, tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    save_shard(shard, folder / "shard-00000.safetensors")
    return folder


@pytest.fixture
def make_trainer(target_folder: Path, corpus_folder: Path, tmp_path: Path) -> Any:
    def make(work: str = "work", **changes: Any) -> HeadTrainer:
        config = dataclasses.replace(CONFIG, **changes)
        return HeadTrainer(config, target_folder, [corpus_folder], tmp_path / work, STOP, aux_layers=(2, 3, 5))

    return make


@pytest.fixture
def new_trainer(target_folder: Path, tmp_path: Path) -> Any:
    """Makes a trainer on the given corpus folders."""

    def make(folders: list[Path], compute_states: ComputeStates | None = None, **changes: Any) -> HeadTrainer:
        config = dataclasses.replace(CONFIG, **changes)
        return HeadTrainer(config, target_folder, folders, tmp_path / "work", STOP, (2, 3, 5), compute_states)

    return make


def saved(shard: Shard, folder: Path) -> Path:
    folder.mkdir()
    save_shard(shard, folder / "shard-00000.safetensors")
    return folder


def test_several_folders_are_one_corpus(new_trainer: Any, shard: Shard, corpus_folder: Path, tmp_path: Path) -> None:
    """Catches shards of the same name in two folders that are taken for one, and a resumed run on others."""
    other = saved(dataclasses.replace(shard, token_ids=shard.token_ids.flip(0)), tmp_path / "other")
    trainer = new_trainer([corpus_folder, other])
    assert len(trainer.corpus.conversations) == 2 * len(shard.lengths)
    assert torch.equal(trainer.corpus.shards[1].token_ids, shard.token_ids.flip(0))
    trainer.run(Recorder(), stop_after=1)
    save_shard(shard, other / "shard-00001.safetensors")
    assert len(new_trainer([corpus_folder, other]).corpus.shards) == 2
    for folders in ([corpus_folder], [other, corpus_folder]):
        with pytest.raises(ValueError, match="was written with the corpus .*; resume with the same --corpus"):
            new_trainer(folders)


def test_a_state_that_names_no_folders_is_refused(new_trainer: Any, corpus_folder: Path, tmp_path: Path) -> None:
    """Catches a trace on the state of an earlier version."""
    new_trainer([corpus_folder]).save()
    file = tmp_path / "work" / "training-state.pt"
    state = torch.load(file, weights_only=True)
    torch.save(state | {"shard_names": ["shard-00000.safetensors"]}, file)
    with pytest.raises(ValueError, match="was written by an earlier version and does not say which folders"):
        new_trainer([corpus_folder])


def test_states_may_be_computed_when_they_are_needed(
    new_trainer: Any, shard: Shard, corpus_folder: Path, tmp_path: Path
) -> None:
    """Catches a trainer that needs recorded states somewhere, or computes others than were recorded."""
    assert shard.features is not None
    ends = torch.tensor(shard.lengths).cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, shard.lengths, strict=True)]
    known = {
        tuple(shard.token_ids[start:end].tolist()): shard.features[start:end]
        for start, end in zip(starts, ends, strict=True)
    }

    def compute(token_ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return torch.cat([known[tuple(piece.tolist())] for piece in token_ids.split(lengths)])

    bare = saved(dataclasses.replace(shard, features=None), tmp_path / "bare")
    recorded, computed = Recorder(), Recorder()
    new_trainer([corpus_folder]).run(recorded)
    (tmp_path / "work" / "training-state.pt").unlink()
    new_trainer([bare], compute).run(computed)
    assert computed.losses == recorded.losses
    assert computed.validation == recorded.validation


def test_states_of_another_target_are_refused(new_trainer: Any, shard: Shard, tmp_path: Path) -> None:
    """Catches a corpus of another target, on which training would fail within a layer."""
    assert shard.features is not None
    folder = saved(dataclasses.replace(shard, features=shard.features[:, 1:]), tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"--corpus: .*shard-00000.safetensors: states are 127 wide, .* need 128"):
        new_trainer([folder])


@pytest.mark.parametrize(("dtype", "matrix_rate"), [("float32", 0.0), ("float32", 0.01), ("bfloat16", 0.01)])
def test_a_tiny_corpus_is_learnt(make_trainer: Any, dtype: str, matrix_rate: float) -> None:
    """Catches gradients that miss the weights, updates that do not reach the computation, and a wrong target."""
    trainer, recorder = make_trainer(num_steps=120, dtype=dtype, matrix_rate=matrix_rate), Recorder()
    trainer.run(recorder)
    assert recorder.losses[-1] < 0.6 * recorder.losses[0]
    assert min(recorder.records[-1].accuracy) > 0.6  # guessing one of 32 would give 0.03
    assert all(weight.dtype == torch.float32 for weight in trainer.head.parameters() if weight.requires_grad)


@pytest.mark.parametrize(
    ("kind", "kill_after"), [("eagle3", 1), ("eagle3", 7), ("medusa", 7), ("eagle", 7), ("mtp", 7)]
)
def test_a_killed_run_repeats_the_losses(
    make_trainer: Any, corpus_folder: Path, shard: Shard, tmp_path: Path, kind: str, kill_after: int
) -> None:
    """Catches optimiser, rate, batch order or corpus that are not restored exactly, and a log with doubled steps.

    The corpus grows between kill and resume, which must change neither vocabulary nor batches.
    """
    whole, killed, resumed = Recorder(), Recorder(), Recorder()
    make_trainer("whole", kind=kind).run(whole)
    assert make_trainer("work", kind=kind, checkpoint_minutes=1e-9).run(killed, stop_after=kill_after) is None
    save_shard(shard, corpus_folder / "shard-00001.safetensors")
    make_trainer("work", kind=kind).run(resumed)
    first = 12 - len(resumed.losses)
    assert first == kill_after - 1  # the checkpoint after the last step was not reached
    assert killed.losses[:first] + resumed.losses == whole.losses
    assert [record.loss for record in read_log(tmp_path / "work" / "log.jsonl")] == whole.losses
    assert resumed.validation == whole.validation


def test_other_settings_do_not_resume(make_trainer: Any) -> None:
    """Catches a run that silently goes on with another batch size or rate than it was begun with."""
    make_trainer().run(Recorder())
    with pytest.raises(ValueError, match="tokens_per_batch = 30, now it is 31"):
        make_trainer(tokens_per_batch=31)
    with pytest.raises(ValueError, match="kind = eagle3, now it is mtp"):
        make_trainer(kind="mtp")


def test_minutes_become_a_number_of_steps(make_trainer: Any) -> None:
    """Catches a budget that is never turned into steps, so that the rate never falls."""
    trainer, recorder = make_trainer(num_steps=None, max_minutes=0.02), Recorder()
    trainer.run(recorder)
    assert recorder.planned[18] is None
    assert recorder.planned[-1] == trainer.num_steps == len(recorder.records) >= 20


def test_rate_rises_then_falls() -> None:
    """Catches a rate that starts at 0, jumps between warm-up and cosine, or ends above its floor."""
    rates = [CONFIG.rate_share(step, 12) for step in range(12)]
    assert rates[0] == pytest.approx(0.5)
    assert rates[1] == rates[2] == pytest.approx(1.0)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert CONFIG.rate_share(12, 12) == pytest.approx(CONFIG.final_rate_share)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", None),
        ("max_minutes", 5.0),
        ("num_steps", 0),
        ("draft_vocab_size", 0),
        ("num_levels", 0),
        ("learning_rate", 0.0),
        ("level_decay", float("nan")),
        ("validation_share", 1.0),
        ("final_rate_share", 2.0),
        ("max_length", 2),
        ("warmup_steps", -1),
        ("matrix_rate", -1.0),
        ("dtype", "float16"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: Any) -> None:
    """Catches a run that would fail after the corpus was written, or train without end."""
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(CONFIG, **{name: value})
