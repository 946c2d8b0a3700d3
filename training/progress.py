"""What a terminal shows while a head is trained."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eyas.training.training_log import StepRecord
from eyas.training.validation import Validation

_SMOOTHING = 0.9


class TrainingProgress:
    """A live bar: steps, loss, accuracy by level, speed, time left. Use as a context manager and as an `Observer`."""

    def __init__(self, console: Console, first_step: int = 0) -> None:
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
        accuracy = " ".join(f"{share:.3f}" for share in self._accuracy)
        note = f"loss {self._loss:.3f}  accuracy {accuracy}  {self._speed:,.0f} tokens/s"
        self._progress.update(self._task, total=num_steps, completed=record.step + 1, note=note)

    def on_validation(self, step: int, validation: Validation) -> None:
        """Print a line above the bar."""
        accuracy = " ".join(f"{share:.3f}" for share in validation.accuracy)
        top4 = " ".join(f"{ranks[-1]:.3f}" for ranks in validation.recall)
        self._progress.console.print(
            f"step {step}: validation accuracy {accuracy}  top-4 {top4}  chain length {validation.chain_length:.3f}"
        )


def _mix(old: float, new: float) -> float:
    return _SMOOTHING * old + (1 - _SMOOTHING) * new
