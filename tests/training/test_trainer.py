from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.training.dataset import ComputeStates
from eyas.training.methods import KINDS
from eyas.training.objective_options import OBJECTIVES
from eyas.training.shard import Shard, save_shard
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import StepRecord, ValidationRecord, read_log, read_records
from eyas.training.validation import Validation

STOP = 2
CONFIG = TrainingConfig(
    kind="eagle3",
    num_steps=12,
    draft_vocab_size=32,
    loss_vocab_size=24,
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
        self.validations: dict[int, Validation] = {}

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        self.records.append(record)
        self.planned.append(num_steps)

    def on_validation(self, step: int, validation: Validation) -> None:
        assert step not in self.validations
        self.validation = validation
        self.validations[step] = validation

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


def test_more_steps_follow_the_longer_curve(make_trainer: Any) -> None:
    """Catches a longer run that ends where the shorter one would have, or goes on at the rates of its end."""
    num_steps = CONFIG.num_steps
    assert num_steps is not None
    interrupted = make_trainer("work")
    interrupted.run(Recorder(), stop_after=2)
    interrupted.save()
    make_trainer("finished").run(Recorder())
    for work, done in (("work", 2), ("finished", num_steps)):
        recorder = Recorder()
        trainer = make_trainer(work, num_steps=2 * num_steps)
        trainer.run(recorder)
        assert trainer.num_steps == trainer.step == 2 * num_steps
        longer = [trainer.config.rate_share(step, 2 * num_steps) for step in range(done, 2 * num_steps)]
        assert [record.rate_share for record in recorder.records] == longer
    with pytest.raises(ValueError, match=f"num_steps = {2 * num_steps}, now it is {num_steps}"):
        make_trainer("work")


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
    texts = [
        (shard.token_ids[start:end].tolist(), shard.features[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]

    def states_of(tokens: list[int]) -> torch.Tensor:
        """Of a text or of its beginning."""
        (found,) = (states for text, states in texts if text[: len(tokens)] == tokens)
        return found[: len(tokens)]

    def compute(token_ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return torch.cat([states_of(piece.tolist()) for piece in token_ids.split(lengths)])

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


def test_both_layers_of_a_head_are_trained(make_trainer: Any) -> None:
    """Catches a number of layers lost on the way to the head, and a layer without an optimiser."""
    trainer = make_trainer(num_layers=2, matrix_rate=3e-2)
    before = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.run(Recorder())
    assert trainer.head.config.layers.num_layers == 2
    assert not [name for name, weight in trainer.weights.items() if torch.equal(weight, before[name])]


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


NOISY = {"feature_noise": 0.1, "loss_rows": "all", "validate_every": 2, "patience": 3, "num_sampled": 8}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_repeats_noise_validations_and_stop(
    make_trainer: Any, tmp_path: Path, kind: str, objective: str
) -> None:
    """Catches noise drawn anew after a resume, validations that count twice towards patience or stand twice in their
    log, and a best head taken from beyond the checkpoint.

    Between the last checkpoint, after step 5, and the kill, after step 6, a validation falls due.
    """
    options: dict[str, Any] = NOISY | {"kind": kind, "objective": objective}
    whole, killed, resumed = Recorder(), Recorder(), Recorder()
    first = make_trainer("whole", **options)
    result = first.run(whole)
    assert make_trainer("work", **options, checkpoint_minutes=1e-9).run(killed, stop_after=6) is None
    second = make_trainer("work", **options)
    assert second.run(resumed) == result
    assert killed.losses[:5] + resumed.losses == whole.losses
    assert len(whole.losses) == 12 or first.best.num_since == 3
    assert {step: x for step, x in killed.validations.items() if step < 6} | resumed.validations == whole.validations
    logs = [read_records(ValidationRecord, tmp_path / work / "validation.jsonl") for work in ("whole", "work")]
    assert logs[0] == logs[1]
    assert [record.step for record in logs[0]] == sorted(whole.validations)
    assert first.best.state() == second.best.state()
    assert all(torch.equal(a, b) for a, b in zip(first.head.parameters(), second.head.parameters(), strict=True))


def test_every_step_draws_its_own_noise(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches noise that repeats at every step, or starts again after a resume."""
    steps: list[int] = []

    def with_noise(features: torch.Tensor, hidden_size: int, std: float, *key: int) -> torch.Tensor:
        steps.append(key[1])
        return features

    monkeypatch.setattr("eyas.training.objective.with_noise", with_noise)
    make_trainer(feature_noise=0.1, checkpoint_minutes=1e-9).run(Recorder(), stop_after=6)
    make_trainer(feature_noise=0.1).run(Recorder())
    assert steps == [*range(6), *range(5, 12)]


def trained_weights(trainer: HeadTrainer) -> torch.Tensor:
    trained = [weight.detach().flatten() for weight in trainer.head.parameters() if weight.requires_grad]
    return torch.cat(trained)


def test_patience_ends_training_and_the_best_head_is_kept(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a last head exported in place of the best, patience counted in steps, and a run that goes on when it is
    started again after it stopped early."""
    lengths = {2: 1.2, 4: 1.5, 6: 1.4, 8: 1.3, 10: 9.0}
    weights: dict[int, torch.Tensor] = {}

    def measure(trainer: HeadTrainer) -> Validation:
        weights[trainer.step] = trained_weights(trainer)
        return Validation([[0.1] * 4], 1.1, lengths[trainer.step])

    monkeypatch.setattr(HeadTrainer, "validate", measure)
    options = {"validate_every": 2, "patience": 2}
    trainer, recorder = make_trainer(**options), Recorder()
    result = trainer.run(recorder)
    assert len(recorder.records) == 8
    assert list(recorder.validations) == [2, 4, 6, 8]
    assert (trainer.best.step, result) == (4, recorder.validations[4])
    assert torch.equal(trained_weights(trainer), weights[4])
    assert not torch.equal(weights[4], weights[8])
    again, silent = make_trainer(**options), Recorder()
    assert again.run(silent) == result
    assert not silent.records
    assert not silent.validations
    assert torch.equal(trained_weights(again), weights[4])


def test_the_last_head_is_validated_whatever_the_interval(make_trainer: Any) -> None:
    """Catches a run whose last steps are never measured, and a last step measured twice."""
    for every, expected in [(5, [5, 10, 12]), (4, [4, 8, 12]), (100, [12])]:
        recorder = Recorder()
        make_trainer(f"work-{every}", validate_every=every).run(recorder)
        assert list(recorder.validations) == expected


def test_validations_are_spread_over_the_run() -> None:
    """Catches validations before a timed run knows its length, and a short run without any."""
    config = dataclasses.replace(CONFIG, num_steps=None, max_minutes=1.0)
    assert not any(config.is_validated_after(step, None) for step in range(1, 100))
    assert sum(config.is_validated_after(step, 1000) for step in range(1, 1001)) == 20
    assert sum(config.is_validated_after(step, 7) for step in range(1, 8)) == 7
    assert config.planned_steps(left_s=100.0, step_s=0.5, validation_s=1.0) == 160
    assert config.planned_steps(left_s=10.0, step_s=0.5, validation_s=1.0) == 0
    fixed = dataclasses.replace(config, validate_every=2)
    assert fixed.planned_steps(left_s=100.0, step_s=0.5, validation_s=1.0) == 100


@pytest.mark.parametrize("kind", KINDS)
def test_levels_beyond_those_trained_are_validated(make_trainer: Any, kind: str) -> None:
    """Catches a Medusa head asked for heads it has not got, and others measured no deeper than they were trained."""
    validation = make_trainer(kind=kind, num_steps=1, num_levels=2, validation_levels=9).run(Recorder())
    assert len(validation.recall) == (2 if kind == "medusa" else 9)


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
        ("objective", "soft"),
        ("loss_rows", "prompts"),
        ("tree_width", 0),
        ("tree_share", 1.1),
        ("feature_noise", -0.1),
        ("feature_noise", float("nan")),
        ("matrix_decay", float("inf")),
        ("validate_every", 0),
        ("validation_levels", 0),
        ("patience", -1),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: Any) -> None:
    """Catches a run that would fail after the corpus was written, or train without end."""
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(CONFIG, **{name: value})
