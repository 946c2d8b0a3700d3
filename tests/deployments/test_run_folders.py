from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from eyas.deployments.run_folders import held, require_file, require_folder, require_new


def _hold(folder: Path, is_held: Event) -> None:
    with held(folder):
        is_held.set()
        time.sleep(60)  # until it is killed


def test_a_work_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    """Catches two runs that write one state file, and a folder that stays taken after its run was killed."""
    spawn = multiprocessing.get_context("spawn")
    is_held = spawn.Event()
    other = spawn.Process(target=_hold, args=(tmp_path / "work", is_held), daemon=True)
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(ValueError, match=r"--work-dir: .*work is in use by another run"), held(tmp_path / "work"):
            pass
    finally:
        other.kill()
        other.join()
    with held(tmp_path / "work"):
        pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """Catches a head that cannot be written, found after it was trained."""
    (tmp_path / "file").write_text("x")
    require_folder("--out", tmp_path / "new" / "head")
    for name in ("file", "file/head"):
        with pytest.raises(ValueError, match="--out: .* cannot be a folder, since .*file is a file"):
            require_folder("--out", tmp_path / name)


def test_another_head_is_not_overwritten(tmp_path: Path) -> None:
    """Catches a head mixed with the files of one that was there, and a resumed run that cannot write its own again."""
    out, work = tmp_path / "head", tmp_path / "work"
    require_new(out, work)
    out.mkdir()
    require_new(out, work)
    (out / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--out: .*head is not empty, and .*work holds no run"):
        require_new(out, work)
    work.mkdir()
    (work / "training-state.pt").write_text("")
    require_new(out, work)


def test_a_file_needs_a_folder(tmp_path: Path) -> None:
    """Catches figures that are lost at the end of a long command."""
    require_file("--json", None)
    require_file("--json", tmp_path / "a.json")
    for file in (tmp_path, tmp_path / "nowhere" / "a.json"):
        with pytest.raises(ValueError, match="--json: .* cannot be written"):
            require_file("--json", file)
