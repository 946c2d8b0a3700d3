"""The folders that the EAGLE authors, lmsys and SpecForge publish: a flat `config.json` beside one weight file."""

from __future__ import annotations

from pathlib import Path

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import read_json
from eyas.models.head_files import HeadFiles


def open_eagle_folder(path: Path) -> HeadFiles | None:
    """The EAGLE head in a folder, or None if it holds something else."""
    if not (path / "config.json").exists():
        return None
    return HeadFiles("eagle3", "EAGLE-3 folder", path, read_json(path / "config.json"), Checkpoint(path))
