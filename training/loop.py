"""The steps of a training run, whatever is trained: length, pace, log, validations in between, a state to resume from.

The caller's batches depend on seed and step alone, so a resumed run repeats the losses an uninterrupted one would have
had, whenever it was killed. Of several ranks, the first one decides what depends on the clock, and it alone writes
files.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from eyas.training.batch import Batch
from eyas.training.heap import keep_freed_memory, return_freed_memory
from eyas.training.ranks import ALONE, Ranks
from eyas.training.run_config import RunConfig
from eyas.training.state_file import StateFile
from eyas.training.training_log import LOG_FILE, StepRecord, TrainingLog

_PACE_STEPS = 20  # steps timed before a run given in minutes knows its number of steps
_SLACK = 0.95  # of the minutes is planned with, because a shared machine slows down
_TRIM_STEPS = 100


class StepObserver(Protocol):
    """Is told how training goes."""

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        """After every step; `num_steps` is None while it is being measured."""


class Trained(Protocol):
    """What a loop trains."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All that is trained, by name; the same on all ranks."""

    def train_on(self, batch: Batch, rate_share: float) -> tuple[float, list[float]]:
        """Move the weights, at a share of the highest rates; gives the loss and, by level, a measure, of all ranks."""

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs of it."""


@dataclass(frozen=True, slots=True)
class Validations:
    """What a loop does when a validation is due.

    Args:
        measure: validates, so that the time it takes is known.
        check: validates and takes note.
        should_stop: whether to train no further, by what was noted.
    """

    measure: Callable[[], object]
    check: Callable[[], None]
    should_stop: Callable[[], bool]


class TrainingLoop:
    """Steps of one run.

    Args:
        work_folder: of the log and the state.
    """

    def __init__(self, config: RunConfig, work_folder: Path, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.work_folder = work_folder
        self.ranks = ranks
        self.num_steps = config.num_steps
        self.step = 0
        self.elapsed_s = 0.0
        self._file = StateFile(work_folder, config, ranks.size)
        self._pace: list[float] = []  # seconds of the steps this process took

    @property
    def state_file(self) -> Path:
        """What `save` writes."""
        return self._file.path

    def log_file(self, name: str) -> Path:
        """Where a log goes; only the first rank's is kept."""
        return self.work_folder / name if self.ranks.is_first else Path(os.devnull)

    def run(
        self,
        trained: Trained,
        batches: Iterator[Batch],
        observer: StepObserver,
        stop_after: int | None = None,
        validations: Validations | None = None,
    ) -> bool:
        """Train to the end; a new run is saved before its first step, and none after its last one.

        Args:
            batches: endless, from `step` on.
            stop_after: leave after that step as if killed.
            validations: due when the config says so.

        Returns:
            Whether the end was reached.

        Raises:
            ValueError: if the loss is no longer finite.
            RuntimeError: if the ranks have drifted apart.
        """
        if self.step == 0:
            self.save(trained)  # from here on the choice of shards is fixed
        keep_freed_memory()
        with closing(TrainingLog(self.log_file(LOG_FILE), self.step)) as log:
            begin, last_save = time.monotonic() - self.elapsed_s, time.monotonic()
            while not self._is_finished(validations):
                record = self._take_step(trained, batches, begin)
                log.write(record)
                if self.num_steps is None and len(self._pace) == _PACE_STEPS:
                    self.num_steps = self.ranks.agree(self._plan(validations))
                observer.on_step(record, self.num_steps)
                if validations is not None and self.config.is_validated_after(self.step, self.num_steps):
                    validations.check()
                if stop_after is not None and self.step >= stop_after:
                    return False
                if self.ranks.agree(time.monotonic() - last_save > 60.0 * self.config.checkpoint_minutes):
                    self.save(trained)
                    last_save = time.monotonic()
        return True

    def _is_finished(self, validations: Validations | None) -> bool:
        if validations is not None and validations.should_stop():
            return True
        return self.num_steps is not None and self.step >= self.num_steps

    def _take_step(self, trained: Trained, batches: Iterator[Batch], begin: float) -> StepRecord:
        step_begin, share = time.monotonic(), self.config.rate_share(self.step, self.num_steps)
        batch = next(batches)
        loss, measured = trained.train_on(batch, share)
        if not math.isfinite(loss):
            raise ValueError(
                f"learning_rate: the loss is {loss} at step {self.step}; lower the rates and choose another work folder"
            )
        num_tokens = self.ranks.total(batch.token_ids.shape[0])
        self.step += 1
        if self.step % _TRIM_STEPS == 0:
            return_freed_memory()
        now = time.monotonic()
        self.elapsed_s = now - begin
        if self.num_steps is None:
            self._pace.append(now - step_begin)
        return StepRecord(self.step - 1, loss, measured, share, num_tokens, self.elapsed_s)

    def _plan(self, validations: Validations | None) -> int:
        """Number of steps that the minutes allow, judged by a step and a validation."""
        assert self.config.max_minutes is not None
        begin = validation_end = time.monotonic()
        if validations is not None:
            validations.measure()
            validation_end = time.monotonic()
        validation_s = validation_end - begin
        left_s = _SLACK * 60.0 * self.config.max_minutes - self.elapsed_s - validation_s
        return self.step + self.config.planned_steps(left_s, sum(self._pace) / len(self._pace), validation_s)

    def save(self, trained: Trained) -> None:
        """Write everything a resumed run needs, if this is the first rank.

        Raises:
            RuntimeError: if the ranks have drifted apart.
        """
        self.ranks.require_equal(trained.weights.values())
        if self.ranks.is_first:
            own = {"step": self.step, "num_steps": self.num_steps, "elapsed_s": self.elapsed_s}
            self._file.write(own | trained.state())

    def read_state(self) -> dict[str, Any] | None:
        """What `save` has written, after which the loop stands where it did then; None for a new run.

        A run that was given more steps since follows the curve of the longer run's rates from here on.

        Raises:
            ValueError: naming what has changed since: the number of ranks or a setting.
        """
        state = self.ranks.agree(self._file.read() if self.ranks.is_first else None)
        if state is not None:
            self.step, self.elapsed_s = state["step"], state["elapsed_s"]
            self.num_steps = self.config.num_steps or state["num_steps"]
        return state
