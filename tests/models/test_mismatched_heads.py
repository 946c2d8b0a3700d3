"""Heads whose config, maps and tensors contradict each other or the target, in every kind: refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head, open_head
from eyas.models.head_writing import write_eagle_folder, write_heads_file
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

HIDDEN, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 32, 61, 40
WEIGHTS, CONFIG = "model.safetensors", "config.json"
MTP_PREFIX = "model.mtp_layers.0."
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")

Change = Callable[[dict[str, Tensor]], object]


@dataclass
class Fitting:
    """A target and heads that fit it; every call writes a fresh one."""

    target: Path
    tiny_models: TinyModels

    def eagle3(self) -> Path:
        return self.tiny_models.head(self.target, draft_vocab_size=DRAFT_VOCAB_SIZE)

    def eagle(self) -> Path:
        config = json.loads((self.eagle3() / CONFIG).read_text())
        tensors = {"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}
        for name, tensor in self.tiny_models.head_tensors(config, seed=1).items():
            if name.startswith(("midlayer.self_attn", "midlayer.mlp", "midlayer.post")):
                own = tensor[:, HIDDEN:].contiguous() if name.endswith(QKV) else tensor
                tensors[name.replace("midlayer.", "layers.0.")] = own
        return self.tiny_models.write(config, tensors)

    def mtp(self) -> Path:
        """A MiMo module beside its target."""
        last = "model.layers.3."
        of_target = load_file(self.target / WEIGHTS)
        tensors = {MTP_PREFIX + name.removeprefix(last): x for name, x in of_target.items() if name.startswith(last)}
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{MTP_PREFIX}{norm}.weight"] = torch.ones(HIDDEN)
        tensors[f"{MTP_PREFIX}input_proj.weight"] = torch.ones(HIDDEN, 2 * HIDDEN)
        return self.tiny_models.write(json.loads((self.target / CONFIG).read_text()), tensors)

    def refusal(self, path: Path) -> str:
        with pytest.raises(ValueError, match=".") as refused:
            self.load(path)
        return str(refused.value)

    def load(self, path: Path) -> None:
        weights = TargetWeights(self.target, DecoderConfig.from_folder(self.target))
        load_head(path, weights, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def fitting(tiny_models: TinyModels) -> Fitting:
    return Fitting(tiny_models.target("Qwen2ForCausalLM"), tiny_models)


def set_last(name: str, value: float) -> Change:
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize("make", [Fitting.eagle3, Fitting.eagle, Fitting.mtp], ids=["EAGLE-3", "EAGLE-1", "MTP"])
def test_the_heads_fit_before_they_are_changed(make: Callable[[Fitting], Path], fitting: Fitting) -> None:
    """Catches cases below that are refused for another reason than the one they are about."""
    fitting.load(make(fitting))


TENSORS: dict[str, tuple[Callable[[Fitting], Path], Change, str]] = {
    "d2t below zero": (Fitting.eagle3, lambda t: t["d2t"].sub_(9), "d2t must map to strictly increasing ids below 61"),
    "d2t too short": (Fitting.eagle3, put("d2t", torch.arange(39)), "tensor d2t is [39], expected [40]"),
    "t2d inverted": (Fitting.eagle3, lambda t: t["t2d"].logical_not_(), "t2d and d2t name different tokens"),
    "t2d of another vocabulary": (
        Fitting.eagle3,
        put("t2d", torch.zeros(62, dtype=torch.bool)),
        "tensor t2d is [62], expected [61]",
    ),
    "projection of another vocabulary": (
        Fitting.eagle3,
        put("lm_head.weight", torch.zeros(39, HIDDEN)),
        "tensor lm_head.weight is [39, 32], expected [40, 32]",
    ),
    "infinity": (Fitting.eagle3, set_last("fc.weight", -torch.inf), "tensor fc.weight holds NaN or infinity"),
    "neither EAGLE": (
        Fitting.eagle,
        put("fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN)),
        "neither EAGLE-1 (fc [H, 2H], first query projection [., H]",
    ),
    "EAGLE-1, NaN": (Fitting.eagle, set_last("fc.weight", torch.nan), "tensor fc.weight holds NaN or infinity"),
    "EAGLE-1, no norm": (
        Fitting.eagle,
        drop("layers.0.post_attention_layernorm.weight"),
        "tensor layers.0.post_attention_layernorm.weight is missing",
    ),
    "EAGLE-1, bias of another size": (
        Fitting.eagle,
        put("fc.bias", torch.zeros(2 * HIDDEN)),
        "tensor fc.bias is [64], expected [32]",
    ),
    "EAGLE-1, unknown": (Fitting.eagle, put("gate.weight", torch.ones(2)), "tensor gate.weight"),
    "MTP in FP8": (
        Fitting.mtp,
        put(f"{MTP_PREFIX}mlp.up_proj.weight_scale_inv", torch.ones(1, 1)),
        f"tensor {MTP_PREFIX}mlp.up_proj.weight_scale_inv scales FP8 weights, which are not supported; convert",
    ),
    "MTP, no norm": (
        Fitting.mtp,
        drop(f"{MTP_PREFIX}final_layernorm.weight"),
        f"tensor {MTP_PREFIX}final_layernorm.weight is missing",
    ),
    "MTP, NaN": (
        Fitting.mtp,
        set_last(f"{MTP_PREFIX}input_proj.weight", torch.nan),
        f"tensor {MTP_PREFIX}input_proj.weight holds NaN or infinity",
    ),
    "MTP, NaN in its layer": (
        Fitting.mtp,
        set_last(f"{MTP_PREFIX}mlp.up_proj.weight", torch.nan),
        "mlp.up_proj.weight holds NaN or infinity",
    ),
    "MTP, unknown": (Fitting.mtp, put(f"{MTP_PREFIX}gate.weight", torch.ones(2)), f"tensor {MTP_PREFIX}gate.weight"),
    "second MTP module": (
        Fitting.mtp,
        put("model.mtp_layers.1.input_proj.weight", torch.ones(2)),
        "2 MTP modules are there, only one is supported",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_contradict_the_rest(case: str, fitting: Fitting) -> None:
    """Catches a map or weight that is believed, made up or dropped: the text stays right and nothing is accepted."""
    make, change, part = TENSORS[case]
    folder = make(fitting)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    message = fitting.refusal(folder)
    assert part in message
    assert "\n" not in message


CONFIGS: dict[str, tuple[Callable[[Fitting], Path], dict[str, Any], str]] = {
    "hidden size": (
        Fitting.eagle3,
        {"target_hidden_size": 64},
        "hidden_size: the head reads states of 64, the target's are 32",
    ),
    "vocabulary": (Fitting.eagle3, {"vocab_size": 62}, "vocab_size: the head was made for 62, the target has 61"),
    "draft vocabulary": (Fitting.eagle3, {"draft_vocab_size": 62}, "draft_vocab_size: 62 exceeds the target's 61"),
    "no width": (Fitting.eagle3, {"hidden_size": None}, "hidden_size: is missing from config.json"),
    "layer ids": (
        Fitting.eagle3,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}},
        "eagle_aux_hidden_state_layer_ids: [2, 3, 9] is outside the target's 4 layers",
    ),
    "EAGLE-1 vocabulary": (
        Fitting.eagle,
        {"vocab_size": 62},
        "vocab_size: the head was made for 62, the target has 61",
    ),
    "EAGLE-1 hidden size": (
        Fitting.eagle,
        {"hidden_size": 64},
        "hidden_size: the head was made for 64, the target has 32",
    ),
    "EAGLE-1 norms": (Fitting.eagle, {"add_para_norm": True}, "add_para_norm: is true, but the head's files hold no"),
    "MTP hidden size": (Fitting.mtp, {"hidden_size": 64}, "hidden_size: the MTP module has 64, the target 32"),
    "MTP vocabulary": (Fitting.mtp, {"vocab_size": 62}, "vocab_size: the MTP module has 62, the target 61"),
    "speculators kind not run": (
        Fitting.eagle3,
        {"speculators_model_type": "peagle"},
        "speculators_model_type: peagle is not supported: it drafts all its tokens in parallel",
    ),
    "speculators kind unknown": (
        Fitting.eagle3,
        {"speculators_model_type": "owl"},
        "speculators_model_type: owl is not supported; eagle3, eagle and mtp are",
    ),
    "speculators layer": (
        Fitting.eagle3,
        {"speculators_model_type": "eagle3"},
        "transformer_layer_config: is missing from config.json",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_contradict_the_rest(case: str, fitting: Fitting) -> None:
    """Catches a head of another target, and a field that is ignored."""
    make, fields, part = CONFIGS[case]
    folder = make(fitting)
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | fields))
    message = fitting.refusal(folder)
    assert part in message
    assert "\n" not in message


def test_shard_that_the_index_names_must_be_there(fitting: Fitting) -> None:
    """Catches half a download served with what has arrived."""
    folder = fitting.eagle3()
    index = {"weight_map": {"fc.weight": WEIGHTS, "norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = fitting.refusal(folder)
    assert "model-00002-of-00002.safetensors is named by model.safetensors.index.json but does not exist" in message


@pytest.mark.parametrize("make", [Fitting.eagle3, Fitting.eagle, Fitting.mtp], ids=["EAGLE-3", "EAGLE-1", "MTP"])
def test_sidecars_of_every_kind_keep_to_their_target(
    make: Callable[[Fitting], Path], fitting: Fitting, tmp_path: Path
) -> None:
    """Catches a sidecar whose kind's own checks would let it pass: the context is all that differs."""
    path = tmp_path / "tiny.heads"
    write_heads_file(path, open_head(make(fitting)), DecoderConfig.from_folder(fitting.target))
    fitting.load(path)
    other = Fitting(fitting.tiny_models.target("Qwen2ForCausalLM", max_position_embeddings=128), fitting.tiny_models)
    message = other.refusal(path)
    assert "the head was made for another target: ctx is 128, expected 256;" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("d2t", 0.5, "tensor d2t must hold whole numbers"),
        ("d2t", float("nan"), "tensor d2t must hold whole numbers"),
        ("d2t", 61.0, "d2t must map to strictly increasing ids below 61"),
    ],
)
def test_maps_in_a_sidecar_are_checked(name: str, value: float, part: str, fitting: Fitting, tmp_path: Path) -> None:
    """Catches ids rounded from what the file holds: a sidecar stores maps as floating-point numbers."""
    path = tmp_path / "tiny.heads"
    write_heads_file(path, open_head(fitting.eagle3()), DecoderConfig.from_folder(fitting.target))
    content = path.read_bytes()
    source = open_head(path).tensors
    offset = len(content) - sum(source.num_bytes(each) for each in source.names[source.names.index(name) :])
    number = torch.tensor(value).numpy().astype("<f4").tobytes()
    end = offset + source.num_bytes(name)
    path.write_bytes(content[: end - 4] + number + content[end:])
    message = fitting.refusal(path)
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("block", None, "config.block must be the config of the module's decoder layer"),
        ("block", [], "config.block must be"),
        ("hidden_first", "no", "config.hidden_first is 'no', expected true or false"),
        ("masks_first", 1, "config.masks_first is 1, expected true or false"),
        ("feeds_back_norm", None, "config.feeds_back_norm is None, expected true or false"),
    ],
)
def test_wiring_of_a_module_in_a_sidecar(field: str, value: Any, part: str, fitting: Fitting, tmp_path: Path) -> None:
    """Catches a module wired by guess: other families join its inputs the other way round."""
    path = tmp_path / "tiny.heads"
    write_heads_file(path, open_head(fitting.mtp()), DecoderConfig.from_folder(fitting.target))
    content = path.read_bytes()
    size = int.from_bytes(content[8:12], "little")
    header = json.loads(content[12 : 12 + size])
    header["config"][field] = value
    text = json.dumps(header).encode()
    path.write_bytes(content[:8] + len(text).to_bytes(4, "little") + text + content[12 + size :])
    message = fitting.refusal(path)
    assert part in message
    assert "\n" not in message


def test_weights_without_their_config(fitting: Fitting) -> None:
    """Catches a riddle where one file of a folder was given."""
    message = fitting.refusal(fitting.eagle3() / WEIGHTS)
    assert "only Medusa heads and .heads come as one file, give the folder of any other" in message


def test_folders_that_would_not_be_read_back_are_not_written(fitting: Fitting, tmp_path: Path) -> None:
    """Catches a conversion that ends in a folder nobody reads: by a final norm EAGLE-3 is told from EAGLE-1."""
    folder = fitting.eagle()
    layer = json.loads((folder / CONFIG).read_text())
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "layernorms": True}
    tensors = {name.replace("layers.0.", "transformer."): x for name, x in load_file(folder / WEIGHTS).items()}
    tensors["fusion_fc.weight"] = tensors.pop("fc.weight")
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in ("post_embedding_layernorm", "pre_lm_head_layernorm")}
    saved = fitting.tiny_models.write(config, tensors)
    fitting.load(saved)
    with pytest.raises(ValueError, match="an EAGLE-1 folder has no place for norm.weight"):
        write_eagle_folder(tmp_path / "out", open_head(saved), DecoderConfig.from_folder(fitting.target))
    assert not any(tmp_path.iterdir())
    (tmp_path / "out.heads").mkdir()
    with pytest.raises(ValueError, match="out.heads is a folder"):
        write_heads_file(tmp_path / "out.heads", open_head(saved), DecoderConfig.from_folder(fitting.target))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 0},
        {"hidden_size": [1]},
        {"hidden_size": "abc"},
        {"rms_norm_eps": "small"},
        {"rope_parameters": "x"},
        {"intermediate_size": {}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_of_a_wrong_type(fields: dict[str, Any], fitting: Fitting) -> None:
    """Catches Python's own error, or a stack trace, for a config edited by hand."""
    path = fitting.eagle3()
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | fields))
    message = fitting.refusal(path)
    assert str(path) in message or next(iter(fields)) in message
    assert "\n" not in message
