from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.models.checkpoint import Checkpoint


def test_tensors_are_read_in_the_dtype_asked_for(tmp_path: Path) -> None:
    """Catches a half-precision checkpoint that stays so on a float32 engine."""
    save_file({"a": torch.arange(6.0).view(2, 3).half(), "b": torch.tensor([1, 0])}, tmp_path / "any.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names) == ["a", "b"]
    assert "a" in checkpoint
    assert "c" not in checkpoint
    tensor = checkpoint.read("a", (2, 3), torch.float32)
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.read("b", (2,), torch.bool).tolist() == [True, False]
    assert checkpoint.read_optional("c", (1,), torch.float32) is None


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    """Catches a tensor of another model that is broadcast or truncated into place."""
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"tensor a is \[2, 3\], expected \[3, 2\]"):
        checkpoint.read("a", (3, 2), torch.float32)
    with pytest.raises(ValueError, match=r"tensor a is \[2, 3\], expected \[6\]"):
        checkpoint.read_optional("a", (6,), torch.float32)
    with pytest.raises(ValueError, match="tensor b is missing"):
        checkpoint.read("b", (3, 2), torch.float32)


def test_folders_without_weights_are_named(tmp_path: Path) -> None:
    """Catches an empty checkpoint, and a download that stopped half way."""
    with pytest.raises(ValueError, match=r"holds no \.safetensors, \.bin or \.pt file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{not json")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        Checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """Catches an index whose second file was never downloaded."""
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"two\.safetensors is named by .* but does not exist"):
        Checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False])
def test_damaged_pickles_are_refused_in_one_line(is_zip: bool, tmp_path: Path) -> None:
    """Catches whatever error torch meets behind a changed byte: a missing key, an empty stack, a failed assertion."""
    file = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(3, 5), "b": torch.ones(5)}, file, _use_new_zipfile_serialization=is_zip)
    content = file.read_bytes()
    rng = random.Random(0)
    refusals = []
    for _ in range(200):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            Checkpoint(file)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert all(str(file) in refusal and "\n" not in refusal for refusal in refusals)


@pytest.mark.parametrize("dtype", ["C64", "F8_E4M3FNUZ", "Q9"])
def test_types_that_are_not_supported_are_named(dtype: str, tmp_path: Path) -> None:
    """Catches a bare lookup error for weights in a type that torch or this reader does not know."""
    header = json.dumps(
        {"odd": {"dtype": dtype, "shape": [1], "data_offsets": [0, 8 if dtype == "C64" else 1]}}
    ).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8 if dtype == "C64" else 1))
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{dtype}"):
        Checkpoint(tmp_path)
