from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from eyas.deployments.corpus_size import announce_size, free_bytes


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with 2 GB free, and where it was looked at."""
    disk = SimpleNamespace(free=2_000_000_000, places=[])

    def usage(place: Path) -> SimpleNamespace:
        disk.places.append(place)
        return SimpleNamespace(free=disk.free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return disk


def test_the_size_is_announced(free: SimpleNamespace, tmp_path: Path) -> None:
    """Catches an announcement of all tokens where some are written already, and lines broken at a terminal's width."""
    printed = io.StringIO()
    announce_size(Console(file=printed, width=40), tmp_path / "a" / "b", 1_000_000, 4617, 400_000, "--corpus")
    assert printed.getvalue() == (
        f"corpus: 1,000,000 tokens of 4,617 bytes; 1.847 GB to write into {tmp_path}/a/b, 2.0 GB free there\n"
    )
    assert free.places == [tmp_path]  # the nearest folder that is there


def test_a_corpus_that_does_not_fit_is_refused(free: SimpleNamespace, tmp_path: Path) -> None:
    """Catches a disk that is full after hours of recording."""
    whole = (
        f"--corpus: the corpus needs about 2.001 GB in {tmp_path}, 2.000 GB are free there; compute the target's "
        "states when they are needed (--states online), give fewer tokens, or put --work-dir on another disk"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        announce_size(Console(file=io.StringIO()), tmp_path, 10**9, 1000, 2_001_000, "--corpus", "about ")
    free.free = 2_001_000_000
    announce_size(Console(file=io.StringIO()), tmp_path, 10**9, 1000, 2_001_000, "--corpus", "about ")


def test_the_real_disk_is_asked(tmp_path: Path) -> None:
    """Catches a folder that is not there yet."""
    assert free_bytes(tmp_path / "not" / "there") > 0
