"""`.heads` files put together by hand, byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.heads_file import open_heads_file
from eyas.models.medusa import MedusaHead
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewTensors = Callable[..., dict[str, Tensor]]

BASE = {"layers": 4, "d_model": 32, "heads": 4, "ctx": 256, "vocab": 61}
CPU = torch.device("cpu")


def by_kind_names(tensors: dict[str, Tensor], first: int = 0) -> dict[str, Tensor]:
    """Heads of one block from their authors' names to the sidecar's, the first head having number `first`."""
    names = {}
    for name, tensor in tensors.items():
        head, _, *rest = name.split(".")
        number = int(head) + first
        names[f"blocks.{number}.layers.0.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{number}.weight"] = tensor
    return names


def write(path: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    header = {
        "kind": "medusa",
        "heads": 3,
        "base": BASE,
        "entries": [{"name": name, "shape": list(tensor.shape)} for name, tensor in tensors.items()],
    } | fields
    text = json.dumps(header).encode()
    blob = b"".join(struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist()) for tensor in tensors.values())
    path.write_bytes(b"TGMH" + struct.pack("<II", 1, len(text)) + text + blob)
    return path


def load(path: Path, target: Path) -> MedusaHead:
    head = load_head(path, TargetWeights(target, DecoderConfig.from_folder(target)), torch.float32, CPU)
    assert isinstance(head, MedusaHead)
    return head


def test_layout_of_the_document(tmp_path: Path) -> None:
    """Catches a byte order, an offset or an order of entries other than the written one."""
    tensors = {
        "blocks.0.layers.0.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "lm_heads.0.weight": torch.ones(5, 2),
    }
    files = open_heads_file(write(tmp_path / "h.heads", tensors, heads=1, first_offset=2, config={"a": 1}))
    assert files is not None
    assert (files.kind, files.config, files.base) == ("medusa", {"a": 1}, BASE)
    assert files.tensors.names == list(tensors)
    for name, tensor in tensors.items():
        assert files.tensors.shape(name) == tuple(tensor.shape)
        assert files.tensors.num_bytes(name) == 4 * tensor.numel()
        assert torch.equal(files.tensors.read(name, tuple(tensor.shape), torch.float32), tensor)


def test_heads_count_from_the_token_after_next(
    medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches every level one token off: the document's head 0 foretells what the target itself does."""
    target = tiny_models.target()
    tensors = medusa_tensors(num_heads=2)
    own = load(write(tmp_path / "own.heads", by_kind_names(tensors), heads=2, first_offset=2), target)
    repeating = medusa_tensors(num_heads=1)
    repeating = {name: tensor + 1 for name, tensor in repeating.items()}
    documented = by_kind_names(repeating) | by_kind_names(tensors, first=1)
    head = load(write(tmp_path / "documented.heads", documented, heads=3), target)
    assert head.max_depth == own.max_depth == 2
    for name, tensor in tensors.items():
        assert torch.equal(head.checkpoint_tensors()[name], tensor)
        assert torch.equal(own.checkpoint_tensors()[name], tensor)


def test_whole_numbers_come_back(medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches vocabulary maps rounded on their way through float32."""
    ids = torch.tensor([50.0, 2.0, 33.0])
    tensors = by_kind_names(medusa_tensors(rows=None)) | {"token_map": ids}
    head = load(write(tmp_path / "h.heads", tensors, first_offset=2), tiny_models.target())
    assert head.candidate_ids.tolist() == [50, 2, 33]
    tensors["token_map"] = torch.tensor([50.5, 2.0, 33.0])
    with pytest.raises(ValueError, match="token_map must hold whole numbers"):
        load(write(tmp_path / "h.heads", tensors, first_offset=2), tiny_models.target())


@pytest.mark.parametrize("name", list(BASE))
def test_another_base_is_refused(
    name: str, medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches a sidecar served with a target it was not trained on, when loaded and already when planned."""
    target = tiny_models.target()
    base = BASE | {name: BASE[name] + 1}
    path = write(tmp_path / "h.heads", by_kind_names(medusa_tensors()), base=base, first_offset=2)
    message = f"made for another target: {name} is {BASE[name]}, expected {BASE[name] + 1};"
    with pytest.raises(ValueError, match=message):
        load(path, target)
    with pytest.raises(ValueError, match=message):
        normalise_head(open_head(path), DecoderConfig.from_folder(target))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """Catches folders and other formats refused as damaged sidecars."""
    (tmp_path / "model.safetensors").write_bytes(b"TGMH")
    assert open_heads_file(tmp_path / "model.safetensors") is None
    assert open_heads_file(tmp_path) is None
