from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.models.eagle_folder import open_eagle_folder
from eyas.models.head_loading import open_head

if TYPE_CHECKING:
    from tests.conftest import TinyModels


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"])
def test_tensors_tell_the_kind(architecture: str, tiny_models: TinyModels) -> None:
    """Catches a kind told from the architecture, which both kinds publish alike."""
    target = tiny_models.target()
    for folder, kind in (
        (tiny_models.head(target, architectures=[architecture]), "eagle3"),
        (tiny_models.eagle_head(target, architectures=[architecture]), "eagle"),
        (tiny_models.changed(tiny_models.eagle_head(target), {}, ("embed_tokens.weight",)), "eagle"),
    ):
        assert open_head(folder).kind == kind


def renamed(folder: Path, tiny_models: TinyModels, rename: Callable[[str], str]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return tiny_models.write(config, {rename(name): tensor for name, tensor in tensors.items()})


def test_prefix_of_an_eagle_head_is_dropped(tiny_models: TinyModels) -> None:
    """Catches a repack whose names begin with `model.` being taken for something else."""
    folder = tiny_models.eagle_head(tiny_models.target())
    files = open_head(renamed(folder, tiny_models, lambda name: f"model.{name}"))
    assert files.kind == "eagle"
    assert sorted(files.tensors.names) == sorted(load_file(folder / "model.safetensors"))


def test_other_checkpoints_are_left_alone(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches a target, a Medusa head or a speculators folder opened as EAGLE."""
    assert open_eagle_folder(tiny_models.target()) is None
    assert open_eagle_folder(tmp_path) is None
    head = load_file(tiny_models.eagle_head(tiny_models.target()) / "model.safetensors")
    for config in ({"medusa_num_heads": 3}, {"model_type": "medusa"}, {"speculators_model_type": "eagle"}):
        assert open_eagle_folder(tiny_models.write(config, head)) is None


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def remove(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return remove


def with_zeros(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle", with_zeros("lm_head.weight", 61, 32), "query projection reads 32, and of those .* lm_head.weight$"),
        ("eagle", with_zeros("norm.weight", 32), "of those tensors it holds norm.weight$"),
        ("eagle", with_zeros("fc.weight", 32, 96), r"fc.weight is \[32, 96\]"),
        ("eagle", without("layers.0.self_attn.q_proj.weight"), "the query projection reads None"),
        (
            "eagle3",
            without("midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
            "the query projection reads 64, and of those tensors it holds none$",
        ),
    ],
)
def test_neither_kind_is_an_error_that_says_why(
    kind: str, change: Callable[[dict[str, Tensor]], None], message: str, tiny_models: TinyModels
) -> None:
    """Catches a head read as the kind it resembles more, with tensors made up or left out."""
    target = tiny_models.target()
    folder = tiny_models.eagle_head(target) if kind == "eagle" else tiny_models.head(target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    with pytest.raises(ValueError, match=f"neither EAGLE-1 .* nor EAGLE-3 .*{message}"):
        open_head(tiny_models.write(json.loads((folder / "config.json").read_text()), tensors))


def test_two_names_of_one_tensor_are_refused(tiny_models: TinyModels) -> None:
    """Catches one of two different layers being picked by chance."""
    folder = tiny_models.changed(tiny_models.head(tiny_models.target()), {"layers.0.self_attn.q_proj.weight": (32, 64)})
    with pytest.raises(ValueError, match=r"tensors .*q_proj.weight and .*q_proj.weight are the same one by name"):
        open_head(folder)
