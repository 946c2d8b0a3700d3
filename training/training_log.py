"""The record of a training run: one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

LOG_FILE = "log.jsonl"
VALIDATION_FILE = "validation.jsonl"  # beside it


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Args:
    step: steps done before this one.
    accuracy: per level, how often the favourite is the head's first candidate, see `Objective`.
    rate_share: of the highest learning rates.
    num_tokens: rows of the batch, of all ranks together.
    """

    step: int
    loss: float
    accuracy: list[float]
    rate_share: float
    num_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """Args:
    step: steps done before.
    recall, chain_length, tree_length: see `Validation`.
    """

    step: int
    recall: list[list[float]]
    chain_length: float
    tree_length: float


Record = TypeVar("Record", StepRecord, ValidationRecord)


class RecordLog(Generic[Record]):
    """Appends records to a file.

    A resumed run repeats what came after its checkpoint: the log first drops records from `first_dropped` on; of a new
    run, with 0, all.
    """

    def __init__(self, record_type: type[Record], file: Path, first_dropped: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_records(record_type, file) if record.step < first_dropped]
        self._opened = file.open("w")
        for record in kept:
            self.write(record)

    def write(self, record: Record) -> None:
        """Append one record; it is on disk when this returns."""
        self._opened.write(json.dumps(asdict(record)) + "\n")
        self._opened.flush()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


class TrainingLog(RecordLog[StepRecord]):
    """The log of the steps, of which `num_steps` are done."""

    def __init__(self, file: Path, num_steps: int = 0) -> None:
        super().__init__(StepRecord, file, num_steps)


class ValidationLog(RecordLog[ValidationRecord]):
    """The log of the validations, the last one after `num_steps` steps at most."""

    def __init__(self, file: Path, num_steps: int = 0) -> None:
        super().__init__(ValidationRecord, file, num_steps + 1)


def read_records(record_type: type[Record], file: Path) -> list[Record]:
    """All records of a log; a last line cut short by a kill is left out."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            records.append(record_type(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return records


def read_log(file: Path) -> list[StepRecord]:
    """All records of a `TrainingLog`."""
    return read_records(StepRecord, file)
