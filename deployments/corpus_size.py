"""How large a corpus gets, said before anything is written, and refused where the disk has no room."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

_GB = 1e9


def free_bytes(folder: Path) -> int:
    """Free on the disk that holds `folder` or will."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def announce_size(
    console: Console, folder: Path, num_tokens: int, token_bytes: int, num_missing: int, option: str, about: str = ""
) -> None:
    """Print a line about a corpus of `num_tokens`, of which `num_missing` are still to be written.

    Args:
        option: what decides over its tokens.
        about: precedes an estimate.

    Raises:
        ValueError: if the missing ones do not fit.
    """
    needed, free = num_missing * token_bytes, free_bytes(folder)
    console.print(
        f"corpus: {about}{num_tokens:,} tokens of {token_bytes:,} bytes; {about}{needed / _GB:.3f} GB to write into "
        f"{folder}, {free / _GB:.1f} GB free there",
        soft_wrap=True,
        highlight=False,
    )
    if needed > free:
        raise ValueError(
            f"{option}: the corpus needs {about}{needed / _GB:.3f} GB in {folder}, {free / _GB:.3f} GB are free there; "
            "compute the target's states when they are needed (--states online), give fewer tokens, or put --work-dir "
            "on another disk"
        )
