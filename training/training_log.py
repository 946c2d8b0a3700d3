"""The record of a training run: one JSON object a line, one line a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Args:
    step: steps done before this one.
    accuracy: per level, how often head and target favour the same token.
    rate_share: of the highest learning rates.
    num_tokens: rows of the batch.
    """

    step: int
    loss: float
    accuracy: list[float]
    rate_share: float
    num_tokens: int
    elapsed_s: float


class TrainingLog:
    """Appends records to a file.

    A resumed run repeats the steps after its checkpoint: opened with `num_steps`, the log first drops them.
    """

    def __init__(self, file: Path, num_steps: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_log(file) if record.step < num_steps] if num_steps else []
        self._opened = file.open("w")
        for record in kept:
            self.write(record)

    def write(self, record: StepRecord) -> None:
        """Append one record; it is on disk when this returns."""
        self._opened.write(json.dumps(asdict(record)) + "\n")
        self._opened.flush()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


def read_log(file: Path) -> list[StepRecord]:
    """All records of a log; a last line cut short by a kill is left out."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            records.append(StepRecord(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return records
