"""The steps of a training run, whatever is trained: length, pace, log, and a state to resume from.

The caller's batches depend on seed and step alone, so a resumed run repeats the losses an uninterrupted one would have
had, whenever it was killed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.training.dataset import Batch
from eyas.training.heap import return_freed_memory
from eyas.training.run_config import RunConfig
from eyas.training.training_log import StepRecord, TrainingLog

_STATE_FILE = "training-state.pt"
_PACE_STEPS = 20  # steps timed before a run given in minutes knows its number of steps
_SLACK = 0.95  # of the minutes is planned with, because a shared machine slows down
_TRIM_STEPS = 10
_MAY_CHANGE = ("checkpoint_minutes",)  # settings a resumed run need not share

TrainOn = Callable[[Batch, float], tuple[float, Tensor]]


class StepObserver(Protocol):
    """Is told how training goes."""

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        """After every step; `num_steps` is None while it is being measured."""


class TrainingLoop:
    """Steps of one run.

    Args:
        work_folder: of the log and the state.
    """

    def __init__(self, config: RunConfig, work_folder: Path) -> None:
        self.config = config
        self.work_folder = work_folder
        self.num_steps = config.num_steps
        self.step = 0
        self.elapsed_s = 0.0
        self._pace: list[float] = []  # seconds of the steps this process took

    def run(
        self,
        train_on: TrainOn,
        batches: Iterator[Batch],
        save: Callable[[], None],
        observer: StepObserver,
        stop_after: int | None = None,
    ) -> bool:
        """Train to the end and save.

        Args:
            train_on: trains on a batch with a share of the highest rates; gives the loss and, by level, a measure.
            batches: endless, from `step` on.
            save: calls `write_state`.
            stop_after: leave after that step without saving, as if killed.

        Returns:
            Whether the end was reached.

        Raises:
            RuntimeError: if the loss is no longer finite.
        """
        with closing(TrainingLog(self.work_folder / "log.jsonl", self.step)) as log:
            begin, last_save = time.monotonic() - self.elapsed_s, time.monotonic()
            while self.num_steps is None or self.step < self.num_steps:
                record = self._take_step(train_on, batches, begin)
                log.write(record)
                observer.on_step(record, self.num_steps)
                if stop_after is not None and self.step >= stop_after:
                    return False
                if time.monotonic() - last_save > 60.0 * self.config.checkpoint_minutes:
                    save()
                    last_save = time.monotonic()
        save()
        return True

    def _take_step(self, train_on: TrainOn, batches: Iterator[Batch], begin: float) -> StepRecord:
        step_begin, share = time.monotonic(), self.config.rate_share(self.step, self.num_steps)
        batch = next(batches)
        loss, measured = train_on(batch, share)
        if not math.isfinite(loss):
            raise RuntimeError(f"step {self.step}: the loss is {loss}; start again with a lower learning_rate")
        now = time.monotonic()
        self.elapsed_s = now - begin
        record = StepRecord(self.step, loss, measured.tolist(), share, batch.token_ids.shape[0], self.elapsed_s)
        self.step += 1
        if self.step % _TRIM_STEPS == 0:
            return_freed_memory()
        if self.num_steps is None:
            self._pace.append(now - step_begin)
            if len(self._pace) == _PACE_STEPS:
                self.num_steps = self.step + self._steps_left(sum(self._pace) / _PACE_STEPS)
        return record

    def _steps_left(self, step_s: float) -> int:
        assert self.config.max_minutes is not None
        return int(max(0.0, _SLACK * 60.0 * self.config.max_minutes - self.elapsed_s) / step_s)

    def write_state(self, content: dict[str, Any]) -> None:
        """Write `content` and where the loop stands; the file appears complete or not at all."""
        self.work_folder.mkdir(parents=True, exist_ok=True)
        partial = self.work_folder / f"{_STATE_FILE}.partial"
        own = {name: getattr(self, name) for name in ("step", "num_steps", "elapsed_s")}
        torch.save({"config": asdict(self.config), "loop": own, "content": content}, partial)
        partial.replace(self.work_folder / _STATE_FILE)

    def read_state(self) -> dict[str, Any] | None:
        """What `write_state` was given, after which the loop stands where it did then; None for a new run.

        Raises:
            ValueError: naming the setting that has changed since.
        """
        file = self.work_folder / _STATE_FILE
        if not file.exists():
            return None
        state: dict[str, Any] = torch.load(file, weights_only=True)
        written, given = state["config"], asdict(self.config)
        changed = sorted(
            name for name in {*written, *given} if name not in _MAY_CHANGE and written.get(name) != given.get(name)
        )
        if changed:
            raise ValueError(
                f"{file} was written with {changed[0]} = {written.get(changed[0])}, now it is "
                f"{given.get(changed[0])}; resume with the same settings or choose another work folder"
            )
        for name, value in state["loop"].items():
            setattr(self, name, value)
        content: dict[str, Any] = state["content"]
        return content
