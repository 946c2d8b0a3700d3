"""One head in every layout it may come in, read as one and the same head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.llama import load_decoder
from eyas.models.medusa import MedusaHead
from eyas.models.medusa_config import MedusaConfig
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewTensors = Callable[..., dict[str, Tensor]]

HIDDEN, VOCAB_SIZE = 32, 61
CPU = torch.device("cpu")


def load(path: Path, target: Path) -> MedusaHead:
    head = load_head(path, TargetWeights(target, DecoderConfig.from_folder(target)), torch.float32, CPU)
    assert isinstance(head, MedusaHead)
    return head


def logits(head: MedusaHead) -> Tensor:
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return head.logits(states, range(1, head.config.num_heads + 1))


def in_vllm_names(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The authors' names translated by hand."""
    names = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        own = f"lm_heads.{head}.weight" if int(layer) == num_layers else f"blocks.{head}.layers.{layer}.{rest[-1]}"
        names[own] = tensor
    return names


def write_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def authors_pickle(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    torch.save(tensors, folder / "medusa_lm_head.pt")
    # The config that was uploaded with the published heads says 2 whatever the file holds.
    write_config(folder, medusa_num_heads=2, medusa_num_layers=1, base_model_name_or_path="a/base", version="1")
    return folder


def authors_safetensors(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    write_config(folder, medusa_num_heads=9)
    return folder


def no_config(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def pickle_by_itself(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    return authors_pickle(folder, tensors, num_layers) / "medusa_lm_head.pt"


def file_of_another_name(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    save_file(tensors, folder / "heads-v3.safetensors")
    return folder / "heads-v3.safetensors"


def prefixed_file(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    save_file(
        {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, folder / "medusa_lm_head.safetensors"
    )
    return folder


def vllm_folder(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    save_file(in_vllm_names(tensors, num_layers), folder / "model.safetensors")
    write_config(folder, model_type="medusa", num_heads=2, num_hidden_layers=9, vocab_size=VOCAB_SIZE)
    return folder


def vllm_prefixed(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    names = {f"medusa_heads.{name}": tensor for name, tensor in in_vllm_names(tensors, num_layers).items()}
    save_file(names, folder / "model.safetensors")
    write_config(folder, model_type="medusa")
    return folder


def folder_without_their_file_name(folder: Path, tensors: dict[str, Tensor], num_layers: int) -> Path:
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, medusa_num_heads=2)
    return folder


LAYOUTS = [
    authors_pickle, authors_safetensors, no_config, pickle_by_itself, file_of_another_name, prefixed_file, vllm_folder,
    vllm_prefixed, folder_without_their_file_name,
]  # fmt: skip


@pytest.mark.parametrize("rows", [VOCAB_SIZE, None], ids=["own projections", "the target's"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_is_the_same_head(
    layout: Callable[[Path, dict[str, Tensor], int], Path],
    num_layers: int,
    rows: int | None,
    medusa_tensors: NewTensors,
    tiny_models: TinyModels,
    tmp_path: Path,
) -> None:
    """Catches a config believed against its tensors, and a layout whose blocks and projections are mixed up."""
    target = tiny_models.target()
    tensors = medusa_tensors(num_heads=5, num_layers=num_layers, rows=rows)
    head = load(layout(tmp_path, tensors, num_layers), target)
    assert (head.config.num_heads, head.config.num_layers, head.config.has_bias) == (5, num_layers, True)
    assert head.config.projection == ("own" if rows else "target")
    written = head.checkpoint_tensors()
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("is_sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("is_pickled", [False, True], ids=["safetensors", "pickle"])
def test_heads_in_the_shards_of_their_target(
    is_pickled: bool, is_sharded: bool, medusa_tensors: NewTensors, tiny_models: TinyModels
) -> None:
    """Catches Medusa-2 models, whose folder is head and target at once, taken for a target without a head."""
    folder = tiny_models.target()
    of_target = load_file(folder / "model.safetensors")
    heads = medusa_tensors(num_layers=2)
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in heads.items()}
    (folder / "model.safetensors").unlink()
    stem, suffix = ("pytorch_model", "bin") if is_pickled else ("model", "safetensors")
    parts = [of_target, prefixed] if is_sharded else [of_target | prefixed]
    weight_map = {}
    for index, part in enumerate(parts):
        name = f"{stem}-{index}.{suffix}" if is_sharded else f"{stem}.{suffix}"
        (torch.save if is_pickled else save_file)(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if is_sharded:
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    raw = json.loads((folder / "config.json").read_text())
    write_config(folder, **raw, medusa_num_heads=2)
    assert open_head(folder).format == "Medusa-2 model"
    written = load(folder, folder).checkpoint_tensors()
    assert all(torch.equal(written[name], tensor) for name, tensor in heads.items())
    if not is_pickled:
        load_decoder(folder, torch.float32, CPU)


def test_a_plain_target_is_no_medusa_head(tiny_models: TinyModels) -> None:
    """Catches any model folder being opened as a head."""
    with pytest.raises(ValueError, match="is not a draft head in a format"):
        open_head(tiny_models.target())


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole projections", "projections of the listed ids"])
def test_truncated_vocabulary(
    is_cut: bool, medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches a token map ignored, or its order lost: it need not ascend."""
    target, ids = tiny_models.target(), torch.tensor([50, 2, 33, 7])
    whole = in_vllm_names(medusa_tensors(), 1)
    expected = logits(load(vllm_folder(tmp_path, medusa_tensors(), 1), target))[..., ids]
    tensors = {name: t[ids] if is_cut and "lm_heads" in name else t for name, t in whole.items()} | {"token_map": ids}
    save_file(tensors, tmp_path / "model.safetensors")
    write_config(tmp_path, model_type="medusa", vocab_size=VOCAB_SIZE, truncated_vocab_size=4)
    head = load(tmp_path, target)
    assert head.candidate_ids.tolist() == ids.tolist()
    torch.testing.assert_close(logits(head), expected)


def test_truncated_vocabulary_of_the_target(
    medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches the target's rows taken in order where the map names others."""
    target = tiny_models.target()
    expected = logits(load(no_config(tmp_path, medusa_tensors(rows=None), 1), target))
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    for ids in (torch.tensor([50, 2, 33, 7]), torch.arange(VOCAB_SIZE).flip(0)):
        tensors = in_vllm_names(medusa_tensors(rows=None), 1) | {"token_map": ids}
        save_file(tensors, tmp_path / "model.safetensors")
        write_config(tmp_path, model_type="medusa")
        torch.testing.assert_close(logits(load(tmp_path, target)), expected[..., ids])


def test_one_projection_for_all_heads(medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches `original_lm_head`, where the file holds the projection once, refused or used by one head only."""
    target = tiny_models.target()
    tensors = medusa_tensors()
    for head in (1, 2):
        tensors[f"{head}.1.weight"] = tensors["0.1.weight"].clone()
    expected = logits(load(vllm_folder(tmp_path, tensors, 1), target))
    kept = {
        name: t
        for name, t in in_vllm_names(tensors, 1).items()
        if name not in ("lm_heads.1.weight", "lm_heads.2.weight")
    }
    save_file(kept, tmp_path / "model.safetensors")
    write_config(tmp_path, model_type="medusa", original_lm_head=True)
    head = load(tmp_path, target)
    assert head.config.projection == "shared"
    torch.testing.assert_close(logits(head), expected)
    write_config(tmp_path, model_type="medusa", original_lm_head=False)
    with pytest.raises(ValueError, match=r"tensor lm_heads\.1\.weight is missing"):
        load(tmp_path, target)


def test_logit_scale(medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches probabilities that are too sharp or too flat for the tree's scores."""
    target = tiny_models.target()
    plain = logits(load(vllm_folder(tmp_path, medusa_tensors(), 1), target))
    write_config(tmp_path, model_type="medusa", logit_scale=0.25)
    torch.testing.assert_close(logits(load(tmp_path, target)), 0.25 * plain)


def test_sizes_come_without_reading_weights(
    medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches a router that cannot tell the depth of a head before its worker has loaded it."""
    files = open_head(authors_safetensors(tmp_path, medusa_tensors(num_heads=4, num_layers=2, bias=False), 2))
    config = normalise_head(files, DecoderConfig.from_folder(tiny_models.target()))
    assert isinstance(config, MedusaConfig)
    assert (config.max_depth, config.num_layers, config.has_bias, config.draft_vocab_size) == (4, 2, False, VOCAB_SIZE)


def test_blocks_that_share_weights_must_all_be_there(
    medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches a head run with fewer blocks than it was trained with, where a library saved equal ones once."""
    target = tiny_models.target()
    tensors = medusa_tensors(num_layers=2)
    for head in range(3):
        for part in ("weight", "bias"):
            tensors[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")  # storage is shared in the pickle, too
    assert load(tmp_path, target).config.num_layers == 2
    save_file({name: t for name, t in tensors.items() if ".1.linear" not in name}, tmp_path / "once.safetensors")
    with pytest.raises(ValueError, match=r"0\.2\.weight is a projection after 2 residual blocks, but head 0 has 1;"):
        load(tmp_path / "once.safetensors", target)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("0.0.linear.weight", "medusa_head.0.0.linear.weight"),
        ("0.1.weight", "medusa_head.0.1.weight"),
        ("blocks.0.layers.0.weight", "medusa_heads.blocks.0.layers.0.weight"),
    ],
)
def test_names_that_mean_one_tensor_are_refused(
    first: str, second: str, medusa_tensors: NewTensors, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Catches one of two different tensors being dropped in silence."""
    tensors = medusa_tensors()
    tensors = in_vllm_names(tensors, num_layers=1) if first.startswith("blocks") else tensors
    save_file(tensors | {second: tensors[first] + 1}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"tensors .* and .* are the same one by name") as refusal:
        load(tmp_path, tiny_models.target())
    assert first in str(refusal.value)
    assert second in str(refusal.value)
