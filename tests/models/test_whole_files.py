from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.models.whole_files import save_whole


def test_a_file_appears_whole(tmp_path: Path) -> None:
    """Catches tensors or metadata that are lost, and what a killed run left staying there."""
    (tmp_path / "a.partial").write_text("half of a file")
    save_whole({"x": torch.arange(3)}, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_who_may_read_a_file_is_left_to_the_umask(tmp_path: Path) -> None:
    """Catches a head that only the account that trained it can serve."""
    (tmp_path / "config.json").touch()
    save_whole({"x": torch.arange(3)}, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trace, an earlier file destroyed, or half of one left to fill the disk, where the disk is full."""

    def fill_disk(tensors: dict[str, torch.Tensor], file: Path, metadata: object) -> None:
        file.write_text("half of a file")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("eyas.models.whole_files.save_file", fill_disk)
    (tmp_path / "a.safetensors").write_text("earlier")
    with pytest.raises(OSError, match=r"a\.safetensors cannot be written: No space left"):
        save_whole({"x": torch.arange(3)}, tmp_path / "a.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert (tmp_path / "a.safetensors").read_text() == "earlier"
