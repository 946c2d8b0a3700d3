from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.training.batch import Batch
from eyas.training.loop import TrainingLoop, Validations
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import StepRecord, read_log

BATCH = Batch(torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool), torch.zeros(5, 2), [5], [1])


class Clock:
    """`time.monotonic` that only goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Counter:
    """A `Trained` whose weight counts its steps; each takes a second."""

    def __init__(self, clock: Clock, losses: Iterator[float] | None = None) -> None:
        self.weights = {"count": torch.zeros(1)}
        self.saves: list[int] = []
        self._clock = clock
        self._losses = losses or itertools.repeat(1.0)

    def train_on(self, batch: Batch, rate_share: float) -> tuple[float, list[float]]:
        self._clock.now_s += 1.0
        self.weights["count"] += 1
        return next(self._losses), [rate_share]

    def state(self) -> dict[str, Any]:
        self.saves.append(int(self.weights["count"]))
        return {"weights": self.weights}


class Silent:
    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        pass


def config(**changes: Any) -> TrainingConfig:
    return TrainingConfig("eagle3", **({"num_steps": 10, "warmup_steps": 0} | changes))


def run(loop: TrainingLoop, trained: Counter, **options: Any) -> bool:
    return loop.run(trained, itertools.repeat(BATCH), Silent(), **options)


def test_a_run_is_saved_before_it_and_every_few_minutes(clock: Clock, tmp_path: Path) -> None:
    """Catches checkpoints in steps or at none, and a state that says another step than its weights are of."""
    trained = Counter(clock)
    assert run(TrainingLoop(config(checkpoint_minutes=3.5 / 60), tmp_path), trained)
    assert trained.saves == [0, 4, 8]
    resumed = TrainingLoop(config(), tmp_path)
    state = resumed.read_state()
    assert state is not None
    assert (resumed.step, resumed.elapsed_s, int(state["weights"]["count"])) == (8, 8.0, 8)
    assert run(resumed, Counter(clock))
    assert resumed.elapsed_s == 10.0
    assert [(record.step, record.num_tokens) for record in read_log(tmp_path / "log.jsonl")] == [
        (step, 5) for step in range(10)
    ]


def test_a_run_left_early_is_not_saved(clock: Clock, tmp_path: Path) -> None:
    """Catches a kill in tests that is gentler than a real one."""
    trained = Counter(clock)
    assert not run(TrainingLoop(config(checkpoint_minutes=1e-9), tmp_path), trained, stop_after=2)
    assert trained.saves == [0, 1]


def test_validations_are_due_as_the_config_says_and_end_the_run(clock: Clock, tmp_path: Path) -> None:
    """Catches a validation between the wrong steps, and a run that goes on when it is told to stop."""
    loop, checked = TrainingLoop(config(validate_every=3), tmp_path), []
    validations = Validations(lambda: None, lambda: checked.append(loop.step), lambda: len(checked) == 2)
    assert run(loop, Counter(clock), validations=validations)
    assert (checked, loop.step) == ([3, 6], 6)


@pytest.mark.parametrize(("validation_s", "expected"), [(0.0, 57), (1.0, 36)])
def test_minutes_are_planned_by_a_step_and_a_validation(
    clock: Clock, tmp_path: Path, validation_s: float, expected: int
) -> None:
    """Catches a plan that forgets the validations, the steps done or the slack: 0.95 minutes are 57 s. Of these, 20
    are spent on 20 steps; then one validation is timed, and 20 are to come."""

    def measure() -> None:
        clock.now_s += validation_s

    loop = TrainingLoop(config(num_steps=None, max_minutes=1.0), tmp_path)
    assert run(loop, Counter(clock), validations=Validations(measure, lambda: None, lambda: False))
    assert loop.num_steps == loop.step == expected


def test_a_run_without_validations_plans_for_none(clock: Clock, tmp_path: Path) -> None:
    """Catches time set aside for what never happens."""
    loop = TrainingLoop(config(num_steps=None, max_minutes=1.0), tmp_path)
    assert run(loop, Counter(clock))
    assert loop.num_steps == loop.step == 57


def test_a_loss_that_is_not_finite_ends_the_run(clock: Clock, tmp_path: Path) -> None:
    """Catches hours of training on after the weights have become NaN, and such weights in the state."""
    trained = Counter(clock, iter([1.0, float("inf")]))
    with pytest.raises(ValueError, match="learning_rate: the loss is inf at step 1; lower the rates"):
        run(TrainingLoop(config(checkpoint_minutes=1e-9), tmp_path), trained)
    assert trained.saves == [0, 1]
