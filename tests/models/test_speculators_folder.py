"""`data/speculators` was written by `benchmarks/speculators_parity.py dump` with speculators 0.9.0 and torch 2.13."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleHead
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_config import Eagle3Config
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.speculators_folder import flat_config, open_speculators_folder
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]

TOLERANCE = 1e-4  # float32, other order of summation
CASES = sorted(Path(__file__).with_name("data").joinpath("speculators").glob("*.safetensors"))
VERIFIER = {"speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "target"}}}


def weights_of(target: Path) -> TargetWeights:
    return TargetWeights(target, DecoderConfig.from_folder(target))


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_head_equals_the_library(file: Path, tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a variant read or computed otherwise than by the library that trained it."""
    target = tiny_models.target(num_hidden_layers=8)
    head = load_head(file.with_suffix(""), weights_of(target), torch.float32, torch.device("cpu"))
    assert isinstance(head, Eagle3Head)
    case, attention = load_file(file), text_attention()
    num_pairs = len(case["token_ids"])
    with torch.inference_mode():
        states = head.extend(case["features"], case["token_ids"], torch.arange(num_pairs), attention)
        torch.testing.assert_close(states, case["states"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(head.logits(states), case["logits"], rtol=0, atol=TOLERANCE)
        states = states[-1:]
        for row, token in enumerate(case["drafted_ids"]):
            best = head.candidate_ids[head.logits(states).argmax()]
            assert best == token  # the chain is greedy, so this is the vocabulary map
            states = head.step(states, token[None], torch.tensor([num_pairs + row]), attention)
            torch.testing.assert_close(states[0], case["drafted_states"][row], rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(head.logits(states)[0], case["drafted_logits"][row], rtol=0, atol=TOLERANCE)


def test_every_variant_is_there() -> None:
    """Catches a comparison that passes because its files are gone."""
    assert len(CASES) == 13


LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
}


def saved(kind: str, **fields: Any) -> dict[str, Any]:
    return {"speculators_model_type": kind, "transformer_layer_config": LAYER, **VERIFIER, **fields}


def test_dropped_defaults_are_those_of_the_model_type() -> None:
    """Catches sizes derived otherwise than by the class whose defaults the library leaves out of the file."""
    layer = {"model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 1}
    config = flat_config({"transformer_layer_config": layer})
    assert (config["head_dim"], config["num_attention_heads"], config["vocab_size"]) == (128, 32, 151936)
    assert config["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(("stated", "expected"), [(None, False), (False, False), (True, True)])
def test_norm_before_residual_is_false_when_missing(
    stated: bool | None, expected: bool, tiny_models: TinyModels
) -> None:
    """Catches the default of vLLM's loader, with which a head trained by the library is hardly ever accepted."""
    target = tiny_models.target()
    tensors = load_file(tiny_models.head(target) / "model.safetensors")
    fields = {} if stated is None else {"norm_before_residual": stated}
    folder = tiny_models.write(saved("eagle3", draft_vocab_size=61, **fields), tensors)
    config = normalise_head(open_head(folder), DecoderConfig.from_folder(target))
    assert isinstance(config, Eagle3Config)
    assert config.norm_before_residual == expected


def test_layer_ids_count_states(tiny_models: TinyModels) -> None:
    """Catches ids from 1 shifted as those of other folders are; the other reading is left for the probe."""
    target = tiny_models.target()
    tensors = load_file(tiny_models.head(target) / "model.safetensors")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    folder = tiny_models.write(saved("eagle3", draft_vocab_size=61, **ids), tensors)
    config = normalise_head(open_head(folder), DecoderConfig.from_folder(target))
    assert config.capture == (1, 2, 3)
    assert (2, 3, 4) in config.plausible_captures


def test_copies_of_the_verifier_are_left_out(tiny_models: TinyModels) -> None:
    """Catches refusing what older versions saved along for the training loss."""
    target = tiny_models.target()
    head = tiny_models.changed(
        tiny_models.head(target), {"verifier_norm.weight": (32,), "verifier_lm_head.weight": (61, 32)}
    )
    folder = tiny_models.write(saved("eagle3", draft_vocab_size=61), load_file(head / "model.safetensors"))
    assert isinstance(load_head(folder, weights_of(target), torch.float32, torch.device("cpu")), Eagle3Head)


def old_eagle(tiny_models: TinyModels, target: Path, added: dict[str, tuple[int, ...]], **fields: Any) -> Path:
    """An EAGLE-1 head under the library's former names."""
    plain = tiny_models.changed(tiny_models.eagle_head(target), added)
    names = {"fc.weight": "fusion_fc.weight", "fc.bias": "fusion_fc.bias"}
    tensors = {
        names.get(name, name.replace("layers.0.", "transformer.")): tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    return tiny_models.write(saved("eagle", **fields), tensors)


NORMS = {
    "post_embedding_layernorm.weight": (32,),
    "pre_lm_head_layernorm.weight": (32,),
    "layers.0.input_layernorm.weight": (32,),
}


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "layernorms"])
def test_old_eagle_folder(has_norms: bool, tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a norm of the former format on another input, or its layer read as one without a norm of its own."""
    target = tiny_models.target()
    added = {"fc.bias": (32,)} | (NORMS if has_norms else {})
    folder = old_eagle(tiny_models, target, added, layernorms=has_norms, fusion_bias=True)
    head = load_head(folder, weights_of(target), torch.float32, torch.device("cpu"))
    assert isinstance(head, EagleHead)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    features, token_ids = torch.randn(1, 32, generator=generator), torch.tensor([7])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (32,), tensors[f"{name}.weight"], 1e-5) if f"{name}.weight" in tensors else x

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"])

    # One row attends to itself alone, so the attention is its value.
    embedded = load_file(target / "model.safetensors")["model.embed_tokens.weight"][token_ids]
    fused = torch.cat([norm("post_embedding_layernorm", embedded), features], dim=1)
    hidden = linear("fusion_fc", fused) + tensors["fusion_fc.bias"]
    value = linear("transformer.self_attn.v_proj", norm("transformer.input_layernorm", hidden))
    value = value.view(1, 2, 1, 8).expand(1, 2, 2, 8).reshape(1, 32)
    hidden = hidden + linear("transformer.self_attn.o_proj", value)
    x = norm("transformer.post_attention_layernorm", hidden)
    inner = F.silu(linear("transformer.mlp.gate_proj", x)) * linear("transformer.mlp.up_proj", x)
    expected = norm("pre_lm_head_layernorm", hidden + linear("transformer.mlp.down_proj", inner))
    with torch.inference_mode():
        states = head.extend(features, token_ids, torch.tensor([0]), text_attention())
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "added", "message"),
    [
        ({"layernorms": True}, {}, "layernorms: is True in config.json, but norm.weight is not in"),
        ({"layernorms": False}, NORMS, "layernorms: is False in config.json, but norm.weight is in"),
        ({"fusion_bias": True}, {}, "fusion_bias: is True in config.json, but fc.bias is not in"),
    ],
)
def test_options_that_disagree_with_the_tensors_are_refused(
    fields: dict[str, Any], added: dict[str, tuple[int, ...]], message: str, tiny_models: TinyModels
) -> None:
    """Catches one of the two being believed in silence."""
    with pytest.raises(ValueError, match=message):
        open_head(old_eagle(tiny_models, tiny_models.target(), added, **fields))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("peagle", "peagle is not supported: it drafts all its tokens in parallel"),
        ("dflash", "dflash is not supported: it drafts blocks by diffusion"),
        ("dspark", "dspark is not supported: it drafts blocks by diffusion"),
        ("eagle9", "eagle9 is not supported; eagle3, eagle and mtp are"),
    ],
)
def test_other_kinds_are_refused_by_name(kind: str, message: str, tmp_path: Path) -> None:
    """Catches a head run by the rules of another kind."""
    (tmp_path / "config.json").write_text(json.dumps(saved(kind)))
    with pytest.raises(ValueError, match=f"speculators_model_type: {message}"):
        open_speculators_folder(tmp_path)


def test_mtp_is_handed_on_as_it_is(tiny_models: TinyModels) -> None:
    """Catches names changed before the kind that knows them has seen them."""
    name = "mtp_layers.0.input_proj.weight"
    files = open_speculators_folder(tiny_models.write(saved("mtp"), {name: torch.zeros(32, 64)}))
    assert files is not None
    assert (files.kind, files.tensors.names, files.config["hidden_size"]) == ("mtp", [name], 32)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (None, "transformer_layer_config: is missing"),
        ({"hidden_size": 32}, "transformer_layer_config: is missing from config.json, or its model_type is"),
        ({"model_type": "llama9"}, "transformer_layer_config.model_type: llama9 is not known"),
    ],
)
def test_bad_layer_configs_are_named(layer: dict[str, Any] | None, message: str) -> None:
    """Catches a layer sized by the defaults of some other model."""
    with pytest.raises(ValueError, match=message):
        flat_config({"speculators_model_type": "eagle3", "transformer_layer_config": layer})
