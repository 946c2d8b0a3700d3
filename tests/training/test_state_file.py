from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.training.run_config import RunConfig
from eyas.training.state_file import StateFile

CONFIG = RunConfig(num_steps=3)
CONTENT = {"step": 2, "weights": {"a": torch.tensor([1.5])}}


def state_file(folder: Path, num_ranks: int = 1, **changes: Any) -> StateFile:
    return StateFile(folder, dataclasses.replace(CONFIG, **changes), num_ranks)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Catches a state that is lost, a partial file left behind, and a new run taken for one to resume."""
    file = state_file(tmp_path / "work", 2)
    assert file.read() is None
    file.write(CONTENT)
    read = state_file(tmp_path / "work", 2, checkpoint_minutes=1.0).read()
    assert read is not None
    assert read["step"] == 2
    assert torch.equal(read["weights"]["a"], torch.tensor([1.5]))
    assert [each.name for each in (tmp_path / "work").iterdir()] == ["training-state.pt"]


def test_a_write_cut_short_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a state written in place, of which a kill leaves half."""
    file = state_file(tmp_path)
    file.write(CONTENT)

    def killed(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        file.write({"step": 3})
    read = file.read()
    assert read is not None
    assert read["step"] == 2


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_a_damaged_state_is_refused(tmp_path: Path, kept: float) -> None:
    """Catches a stack trace, and a run begun anew over hours of work, where the disk has lost part of the file."""
    file = state_file(tmp_path)
    file.write(CONTENT)
    content = file.path.read_bytes()
    file.path.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ValueError, match=r"training-state\.pt is damaged and cannot be resumed from; remove it"):
        file.read()


def test_what_has_changed_is_refused(tmp_path: Path) -> None:
    """Catches a run that silently goes on with other settings or batches than it was begun with."""
    state_file(tmp_path, 2).write(CONTENT)
    with pytest.raises(ValueError, match="was written by 2 ranks, now there are 1; resume with as many"):
        state_file(tmp_path).read()
    with pytest.raises(ValueError, match="was written with seed = 0, now it is 1; resume with the same settings"):
        state_file(tmp_path, 2, seed=1).read()


def test_a_run_may_be_given_more_steps_but_no_fewer(tmp_path: Path) -> None:
    """Catches a run that cannot be made longer, and one that is cut short or planned anew without a word."""
    state_file(tmp_path).write(CONTENT)
    assert state_file(tmp_path, num_steps=5).read() is not None
    for changes in ({"num_steps": 2}, {"num_steps": None, "max_minutes": 1.0}, {"num_steps": 5, "seed": 1}):
        with pytest.raises(ValueError, match="resume with the same settings"):
            state_file(tmp_path, **changes).read()


def test_a_setting_that_is_newer_than_the_state_was_at_its_default(tmp_path: Path) -> None:
    """Catches a run of an earlier version that cannot be resumed, and one that goes on with a new setting."""
    file = state_file(tmp_path)
    file.write(CONTENT)
    state = torch.load(file.path, weights_only=True)
    del state["config"]["level_decay"], state["num_ranks"]
    torch.save(state, file.path)
    assert file.read() is not None
    with pytest.raises(ValueError, match=r"level_decay = 0.8, now it is 0.5"):
        state_file(tmp_path, level_decay=0.5).read()


def test_a_state_of_another_layout_is_refused(tmp_path: Path) -> None:
    """Catches a trace on the state of an earlier version."""
    file = state_file(tmp_path)
    torch.save({"config": {}, "loop": {"step": 1}, "content": {}}, file.path)
    with pytest.raises(ValueError, match="was written by an earlier version; choose another work folder"):
        file.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """Catches a trace of torch's, and a last state lost, where the disk is full."""
    file = state_file(tmp_path)
    file.write(CONTENT)
    (tmp_path / "training-state.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"training-state\.pt cannot be written"):
        file.write({**CONTENT, "weights": {"a": torch.zeros(300_000)}})
    assert [each.name for each in tmp_path.iterdir()] == ["training-state.pt"]
    assert file.read() is not None
