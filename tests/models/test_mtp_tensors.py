from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.models.checkpoint import Checkpoint
from eyas.models.head_files import HeadFiles
from eyas.models.head_loading import open_head
from eyas.models.mtp_layout import MtpTensors
from eyas.models.mtp_tensors import module_of, open_mtp_checkpoint

if TYPE_CHECKING:
    from tests.conftest import TinyModels

DEEPSEEK_MODULE = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj", "mlp.experts.0.up_proj")
QWEN_MODULE = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
               "mtp.layers.0.self_attn.o_proj", "mtp.layers.0.mlp.experts.0.up_proj")  # fmt: skip
LAYERNORM_MODULE = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "self_attn.o_proj",
                    "mlp.experts.0.up_proj")  # fmt: skip
COMMON = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight", "block.self_attn.o_proj.weight",
          "block.mlp.experts.0.up_proj.weight")  # fmt: skip
TARGET = ("model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.3.self_attn.o_proj", "lm_head")


def tensors_of(*names: str) -> dict[str, Tensor]:
    """A small tensor of each name, all different."""
    return {f"{name}.weight": torch.full((2,), float(index)) for index, name in enumerate(names)}


def deepseek_names(index: int) -> list[str]:
    return [f"model.layers.{index}.{name}" for name in DEEPSEEK_MODULE]


def mimo_names(index: int) -> list[str]:
    return [f"model.mtp_layers.{index}.{name}" for name in LAYERNORM_MODULE]


@pytest.mark.parametrize(
    ("names", "wiring"),
    [
        (deepseek_names(4), {"hidden_first": False, "masks_first": True, "feeds_back_norm": True}),
        (QWEN_MODULE, {"hidden_first": False, "masks_first": False, "feeds_back_norm": True}),
        (mimo_names(0), {"hidden_first": True, "masks_first": True, "feeds_back_norm": True}),
    ],
    ids=["deepseek", "qwen", "mimo"],
)
@pytest.mark.parametrize("rest", [(), TARGET], ids=["alone", "in the target"])
def test_layouts_are_told_apart(
    names: tuple[str, ...], wiring: dict[str, bool], rest: tuple[str, ...], tiny_models: TinyModels
) -> None:
    """Catches one family wired as another, a tensor under another's name, and the target's taken for the module's."""
    config = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    folder = tiny_models.write(config, tensors_of(*names, *rest))
    files = open_head(folder)
    assert files.kind == "mtp"
    assert files.config == {"block": config} | wiring
    assert sorted(files.tensors.names) == sorted(COMMON)
    values = [files.tensors.read(name, (2,), torch.float32)[0].item() for name in COMMON]
    assert values == [0, 1, 2, 3, 4, 5]


def test_layer_of_a_multimodal_target_is_its_text_model(tiny_models: TinyModels) -> None:
    """Catches the sizes of a vision tower, or none, taken for those of the layer."""
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4}}
    assert open_head(tiny_models.write(config, tensors_of(*QWEN_MODULE))).config["block"] == config["text_config"]


def test_names_come_from_the_index_of_many_files(tiny_models: TinyModels) -> None:
    """Catches a module overlooked in a checkpoint of several files, or one file's names taken for all."""
    folder = tiny_models.write({"num_hidden_layers": 4}, tensors_of(*deepseek_names(4), *TARGET))
    whole = folder / "model.safetensors"
    name = "model-00001-of-00001.safetensors"
    whole.rename(folder / name)
    weight_map = dict.fromkeys(Checkpoint(folder).names, name)
    (folder / "model.safetensors.index.json").write_text(str({"weight_map": weight_map}).replace("'", '"'))
    assert sorted(open_head(folder).tensors.names) == sorted(COMMON)


def test_other_folders_are_left_to_others(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches a head of another kind, or a target without a module, claimed and then refused."""
    assert open_mtp_checkpoint(tmp_path) is None
    assert open_mtp_checkpoint(tiny_models.write({"num_hidden_layers": 4}, tensors_of(*TARGET))) is None
    assert open_mtp_checkpoint(tiny_models.head(tiny_models.target())) is None
    speculators = tensors_of(*(f"mtp_layers.0.{name}" for name in LAYERNORM_MODULE))
    assert open_mtp_checkpoint(tiny_models.write({"speculators_model_type": "mtp"}, speculators)) is None


@pytest.mark.parametrize(("model_type", "is_hidden_first"), [("qwen2", True), ("qwen3", False), ("qwen3_next", False)])
def test_speculators_names(model_type: str, is_hidden_first: bool, tiny_models: TinyModels) -> None:
    """Catches speculators' modules wired as MiMo's, whose names they borrow; and its copies of the target refused."""
    names = [f"mtp_layers.0.{name}" for name in LAYERNORM_MODULE]
    folder = tiny_models.write({}, tensors_of(*names, "embed_tokens", "lm_head"))
    config = {"model_type": model_type, "num_nextn_predict_layers": 1}
    files = module_of(HeadFiles("mtp", "speculators mtp folder", folder, config, Checkpoint(folder)))
    assert isinstance(files.tensors, MtpTensors)
    assert sorted(files.tensors.names) == sorted(COMMON)
    assert files.tensors.file_name("eh_proj.weight") == "mtp_layers.0.input_proj.weight"
    assert files.config == {
        "block": config, "hidden_first": is_hidden_first, "masks_first": False, "feeds_back_norm": True
    }  # fmt: skip
    assert module_of(files) is files


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (
            [*deepseek_names(4), "model.layers.4.eh_proj.weight_scale_inv"],
            {},
            r"tensor model\.layers\.4\.eh_proj\.weight_scale_inv scales FP8 weights",
        ),
        (deepseek_names(5), {}, r"expected at model\.layers\.4\., found at index 5"),
        (mimo_names(1), {}, r"expected at model\.mtp_layers\.0\., found at index 1"),
        (deepseek_names(4), {"num_hidden_layers": None}, "num_hidden_layers: is missing"),
        (
            [*deepseek_names(4), *deepseek_names(5)],
            {"num_nextn_predict_layers": 2},
            "2 MTP modules are there, only one is supported; set num_nextn_predict_layers to 1",
        ),
        (
            [*QWEN_MODULE, "mtp.layers.1.self_attn.o_proj"],
            {"mtp_num_hidden_layers": 2},
            "2 MTP modules are there, only one is supported; set mtp_num_hidden_layers to 1",
        ),
        (TARGET, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, but no tensor of an MTP module"),
    ],
    ids=["fp8", "later layer", "later module", "no layer count", "two modules", "two layers", "left out when saved"],
)
def test_refusals_say_what_to_do(
    names: list[str], config: dict[str, Any], message: str, tiny_models: TinyModels
) -> None:
    """Catches a module that would load with other weights than it was trained with."""
    tensors = {name.replace("scale_inv.weight", "scale_inv"): tensor for name, tensor in tensors_of(*names).items()}
    folder = tiny_models.write({"num_hidden_layers": 4} | config, tensors)
    with pytest.raises(ValueError, match=message):
        open_head(folder)


@pytest.mark.parametrize(
    ("names", "field"),
    [
        ([*deepseek_names(4), *deepseek_names(5)], "num_nextn_predict_layers"),
        ([*mimo_names(0), *mimo_names(1)], "num_nextn_predict_layers"),
        ([*QWEN_MODULE, "mtp.layers.1.self_attn.o_proj"], "mtp_num_hidden_layers"),
    ],
    ids=["deepseek", "mimo", "qwen"],
)
def test_first_of_several_modules_may_be_chosen(names: list[str], field: str, tiny_models: TinyModels) -> None:
    """Catches the remedy that the refusal names not working, or mixing the modules."""
    folder = tiny_models.write({"num_hidden_layers": 4, field: 1}, tensors_of(*names))
    tensors = open_head(folder).tensors
    assert sorted(tensors.names) == sorted(COMMON)
    assert tensors.read("block.self_attn.o_proj.weight", (2,), torch.float32)[0] == 4


def test_speculators_tensors_of_neither_model_are_named(tiny_models: TinyModels) -> None:
    """Catches a reduced vocabulary, or a head of several levels, ignored."""
    names = [f"mtp_layers.0.{name}" for name in LAYERNORM_MODULE]
    folder = tiny_models.write({}, tensors_of(*names, "masked_embedding.centroids"))
    files = HeadFiles("mtp", "speculators mtp folder", folder, {"model_type": "qwen3"}, Checkpoint(folder))
    with pytest.raises(ValueError, match=r"tensor masked_embedding\.centroids\.weight belongs to a variant of MTP"):
        module_of(files)
