"""What a terminal shows while a head is trained."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eyas.training.training_log import StepRecord
from eyas.training.validation import WIDTH, Validation

_SMOOTHING = 0.9


class TrainingProgress:
    """A live bar: steps, loss, accuracy by level, speed, time left. Use as a context manager and as an `Observer`.

    Args:
        measure: what a record's accuracy is called.
    """

    def __init__(self, console: Console, first_step: int = 0, measure: str = "accuracy") -> None:
        self._measure = measure
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task = self._progress.add_task("training", total=None, completed=first_step, note="")
        self._last: StepRecord | None = None
        self._loss = self._speed = 0.0
        self._accuracy: list[float] = []

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        """Move the bar; figures are running means."""
        if self._last is None:
            self._loss, self._accuracy = record.loss, record.accuracy
        else:
            speed = record.num_tokens / max(1e-9, record.elapsed_s - self._last.elapsed_s)
            self._speed = _mix(self._speed or speed, speed)
            self._loss = _mix(self._loss, record.loss)
            self._accuracy = [_mix(old, new) for old, new in zip(self._accuracy, record.accuracy, strict=True)]
        self._last = record
        note = f"loss {self._loss:.3f}  {self._measure} {_shares(self._accuracy)}  {self._speed:,.0f} tokens/s"
        self._progress.update(self._task, total=num_steps, completed=record.step + 1, note=note)

    def on_validation(self, step: int, validation: Validation) -> None:
        """Print a line above the bar."""
        accuracy, top4 = _shares(validation.accuracy), _shares([ranks[-1] for ranks in validation.recall])
        left_s = self._progress.tasks[self._task].time_remaining
        time_left = "" if left_s is None else f"  {timedelta(seconds=int(left_s))} left"
        self._progress.console.print(
            f"step {step}: loss {self._loss:.3f}  validation accuracy {accuracy}  top-{WIDTH} {top4}  "
            f"chain length {validation.chain_length:.3f}  tree length {validation.tree_length:.3f}  "
            f"{self._speed:,.0f} tokens/s{time_left}",
            highlight=False,
            soft_wrap=True,
        )


def _shares(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _mix(old: float, new: float) -> float:
    return _SMOOTHING * old + (1 - _SMOOTHING) * new
