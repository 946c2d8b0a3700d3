from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.models.vocabulary_map import read_token_map


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content) if path.suffix == ".json" else "\n".join(map(str, content)))
    return path


@pytest.mark.parametrize("name", ["ids.pt", "ids.json", "ids.txt"])
def test_token_maps_are_sorted(name: str, tmp_path: Path) -> None:
    """Catches columns that stand for other tokens than the rows that score them."""
    assert read_token_map(write(tmp_path / name, [9, 0, 4]), 10).tolist() == [0, 4, 9]


def test_token_map_of_a_tensor(tmp_path: Path) -> None:
    """Catches refusing the other form FR-Spec lists are published in."""
    assert read_token_map(write(tmp_path / "ids.pt", torch.tensor([5, 1])), 10).tolist() == [1, 5]


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ids.json", [3, 10], "holds id 10, the target's vocabulary has 10"),
        ("ids.json", [-1], "holds id -1"),
        ("ids.txt", [3, 4, 3], "holds an id twice"),
        ("ids.json", [], "must hold a flat list of token ids"),
        ("ids.json", [True, False], "must hold a flat list of token ids"),
        ("ids.json", {"3": 4}, "must hold a flat list of token ids"),
        ("ids.pt", torch.zeros(2, 2, dtype=torch.int64), "must hold a flat list of token ids"),
        ("ids.txt", ["three"], "cannot be read"),
        ("ids.pt", Code(), "holds objects other than a list of ids"),
    ],
)
def test_bad_token_maps_are_refused(name: str, content: Any, message: str, tmp_path: Path) -> None:
    """Catches ids outside the vocabulary, repeated columns, and files that would run code."""
    with pytest.raises(ValueError, match=rf"^token_map: .*{message}"):
        read_token_map(write(tmp_path / name, content), 10)


def test_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """Catches an error of the unpickler reaching whoever starts the server."""
    path = write(tmp_path / "ids.pt", [3, 4])
    content = path.read_bytes()
    for cut in (0, 10, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r"^token_map: .*ids\.pt [^\n]*$"):
            read_token_map(path, 10)


@pytest.mark.parametrize(
    ("name", "message"), [("none.json", "does not exist"), ("ids.csv", "must end in .pt, .json or .txt")]
)
def test_unreadable_paths_are_named(name: str, message: str, tmp_path: Path) -> None:
    """Catches a map that is left out because its file is not there."""
    with pytest.raises(ValueError, match=message):
        read_token_map(tmp_path / name, 10)
