"""Files cut into pieces small enough to be carried one by one, each listed with its sum in SHA256SUMS.

Pieces of a file are `<file>.part000`, `.part001`, ...; they may arrive in any order and in several calls.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

SUMS = "SHA256SUMS"
INBOX = Path(__file__).resolve().parent / "training"


def cut(files: list[Path], folder: Path, piece_bytes: int) -> None:
    """Write the pieces of `files` and their sums into `folder`, in place of those an earlier call left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.part*"), *folder.glob(SUMS)]:
        old.unlink()
    lines = []
    for file in files:
        with file.open("rb") as opened:
            number = 0
            while (content := opened.read(piece_bytes)) or number == 0:
                piece = folder / f"{file.name}.part{number:03}"
                piece.write_bytes(content)
                lines.append(f"{hashlib.sha256(content).hexdigest()}  {piece.name}\n")
                number += 1
    (folder / SUMS).write_text("".join(lines))


def collect(inbox: Path, store: Path) -> list[str]:
    """Copy what has arrived in `inbox` into `store`; returns the names of the pieces that neither holds.

    A store that belongs to other sums is emptied first.

    Raises:
        ValueError: if there are no sums, or a piece is damaged.
    """
    listed = next((file for file in (inbox / SUMS, store / SUMS) if file.exists()), None)
    if listed is None:
        raise ValueError(f"{inbox} holds no {SUMS}; make the pieces with benchmarks/gpu/pack_training.py")
    text = listed.read_text()
    if not (store / SUMS).exists() or (store / SUMS).read_text() != text:
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
        (store / SUMS).write_text(text)
    missing = []
    for line in text.splitlines():
        expected, _, name = line.partition("  ")
        if Path(name).name != name:
            raise ValueError(f"{listed}: {name} is not the name of a piece")
        arrived, kept = inbox / name, store / name
        if kept.exists() and _sum(kept) == expected:
            continue
        if not arrived.exists():
            missing.append(name)
        elif _sum(arrived) != expected:
            raise ValueError(f"{arrived} is damaged: its sum is not that in {SUMS}; carry it again")
        else:
            shutil.copyfile(arrived, kept)
    return missing


def join(store: Path, name: str, file: Path) -> None:
    """Put the pieces of `name` together; all of them are there."""
    with file.open("wb") as joined:
        for piece in sorted(store.glob(f"{name}.part*")):
            with piece.open("rb") as opened:
                shutil.copyfileobj(opened, joined)


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
