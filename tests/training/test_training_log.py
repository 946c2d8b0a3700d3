from __future__ import annotations

from pathlib import Path

from eyas.training.training_log import (
    StepRecord,
    TrainingLog,
    ValidationLog,
    ValidationRecord,
    read_log,
    read_records,
)


def make_record(step: int) -> StepRecord:
    return StepRecord(step, 5.0 / (step + 1), [0.1, 0.05], 1.0, 100, float(step))


def write(file: Path, num_steps: int, steps: range) -> None:
    log = TrainingLog(file, num_steps)
    for step in steps:
        log.write(make_record(step))
    log.close()


def test_a_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    """Catches doubled steps after a resume, and a log that one broken line makes unreadable."""
    file = tmp_path / "work" / "log.jsonl"
    write(file, 0, range(5))
    with file.open("a") as opened:
        opened.write('{"step": 5, "lo')
    write(file, 3, range(3, 7))
    assert read_log(file) == [make_record(step) for step in range(7)]


def test_a_new_run_begins_an_empty_log(tmp_path: Path) -> None:
    """Catches a curve that shows an earlier run's steps."""
    file = tmp_path / "log.jsonl"
    write(file, 0, range(5))
    write(file, 0, range(2))
    assert read_log(file) == [make_record(step) for step in range(2)]


def test_a_resumed_log_has_every_validation_once(tmp_path: Path) -> None:
    """Catches the validation at the checkpoint dropped, or those after it kept twice."""
    file = tmp_path / "validation.jsonl"
    records = [ValidationRecord(step, [[0.1, 0.2, 0.3, 0.4]], 1.2, 1.5 + step) for step in (10, 20, 30, 40)]
    for num_steps, written in [(0, records[:3]), (20, records[2:])]:
        log = ValidationLog(file, num_steps)
        for record in written:
            log.write(record)
        log.close()
    assert read_records(ValidationRecord, file) == records
