"""The folders of a training run: found to be usable before hours are spent, and used by one run at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "run.lock"


def require_folder(option: str, folder: Path) -> None:
    """Find whether a folder can be written to, without making it.

    Raises:
        ValueError: naming `option` if it or what it would be made in is a file, or may not be written to.
    """
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{option}: {folder} cannot be a folder, since {place} is a file; give another name")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {folder} cannot be written, {place} is read-only; give another place")


def require_file(option: str, file: Path | None) -> None:
    """Raise `ValueError` for a file that could not be written; None is left alone."""
    if file is not None and (file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK)):
        raise ValueError(f"{option}: {file} cannot be written: its folder must exist, and it must be a file")


def require_new(out: Path, work_folder: Path) -> None:
    """Raise `ValueError` if `out` holds something that is not this run's, which began in its work folder."""
    if out.is_dir() and any(out.iterdir()) and not any(work_folder.glob("training-state.pt")):
        raise ValueError(
            f"--out: {out} is not empty, and {work_folder} holds no run that could have written it; give another name, "
            "or remove it first"
        )


@contextmanager
def held(work_folder: Path) -> Iterator[None]:
    """Make the work folder and keep it for this process until the end; a process that dies lets go of it.

    A folder in which nothing was written is removed.

    Raises:
        ValueError: if another process holds it.
    """
    require_folder("--work-dir", work_folder)
    is_new = not work_folder.exists()
    work_folder.mkdir(parents=True, exist_ok=True)
    with (work_folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--work-dir: {work_folder} is in use by another run; wait for its end or choose another"
            ) from None
        try:
            yield
        finally:
            if is_new and [file.name for file in work_folder.iterdir()] == [LOCK_FILE]:
                (work_folder / LOCK_FILE).unlink()
                work_folder.rmdir()
