from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.llama import LlamaDecoder, load_decoder

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]

NUM_TOKENS = 80
VOCAB_SIZE = 61
TOLERANCE = 1e-4  # float32, other order of summation than transformers
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama without grouped queries": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama with one key-value head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama with wide heads": ("LlamaForCausalLM", {"head_dim": 16}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "yarn rope": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


def load(folder: Path) -> LlamaDecoder:
    return load_decoder(folder, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def run_native(folder: Path, token_ids: Tensor, attention: Attention) -> tuple[Tensor, list[Tensor]]:
    """Logits `[T, V]`, and the residual stream before, between and after the layers."""
    model = load(folder)
    capture = tuple(range(model.config.num_layers + 1))
    output = model(token_ids, torch.arange(token_ids.numel()), attention, capture)
    assert output.features is not None
    return model.logits(output.hidden), list(output.features.chunk(len(capture), dim=-1))


@torch.inference_mode()
def run_transformers(folder: Path, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same from `transformers`, the last state taken where its own list has the normed one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0][0]))
    output = model(token_ids[None], output_hidden_states=True)
    return output.logits[0], [state[0] for state in output.hidden_states[:-1]] + before_norm


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(family: str, tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a missing bias, norm, scaling or head, and captured states that are off by a layer or by the norm."""
    architecture, options = FAMILIES[family]
    folder = tiny_models.target(architecture, **options)
    token_ids = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    logits, states = run_native(folder, token_ids, text_attention())
    expected_logits, expected_states = run_transformers(folder, token_ids)
    for state, expected in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(logits, expected_logits, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("scaling", [None, LLAMA3, LINEAR, YARN], ids=["default", "llama3", "linear", "yarn"])
def test_rope_in_the_older_form(
    scaling: dict[str, Any] | None, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches `rope_theta` and `rope_scaling`, as nearly every published file has them, being ignored."""
    parameters = scaling or {"rope_type": "default", "rope_theta": 77.0}
    folder = tiny_models.target(rope_parameters=parameters)
    token_ids = torch.arange(NUM_TOKENS) % VOCAB_SIZE
    expected, _ = run_native(folder, token_ids, text_attention())
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    raw["rope_theta"] = parameters["rope_theta"]
    raw["rope_scaling"] = scaling and {name: value for name, value in scaling.items() if name != "rope_theta"}
    (folder / "config.json").write_text(json.dumps(raw))
    logits, _ = run_native(folder, token_ids, text_attention())
    assert torch.equal(logits, expected)


def test_text_in_pieces(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches positions counted from the first row of a call instead of from the start of the text."""
    model = load(tiny_models.target())
    token_ids = torch.arange(40)
    attention = text_attention()
    with torch.inference_mode():
        whole = model(token_ids, torch.arange(40), text_attention()).hidden
        pieces = [
            model(piece, positions, attention).hidden
            for piece, positions in zip(token_ids.split(7), torch.arange(40).split(7), strict=True)
        ]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=TOLERANCE, atol=TOLERANCE)


def test_capture_follows_the_order_asked_for(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches features sorted or deduplicated, which a head's first projection would read as other layers'."""
    folder = tiny_models.target()
    token_ids, positions = torch.arange(9), torch.arange(9)
    _, states = run_native(folder, token_ids, text_attention())
    model = load(folder)
    with torch.inference_mode():
        features = model(token_ids, positions, text_attention(), (4, 2, 2, 0)).features
        nothing = model(token_ids, positions, text_attention()).features
    assert features is not None
    assert torch.equal(features, torch.cat([states[index] for index in (4, 2, 2, 0)], dim=-1))
    assert nothing is None


def test_final_state_is_what_the_logits_read(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a head that asks for the normed state and gets the residual stream."""
    model = load(tiny_models.target())
    with torch.inference_mode():
        capture = (model.config.final_index, 4)
        output = model(torch.arange(9), torch.arange(9), text_attention(), capture)
    assert output.features is not None
    final, residual = output.features.chunk(2, dim=-1)
    assert torch.equal(final, output.hidden)
    assert torch.equal(final, model.norm(residual))


def test_sharded_checkpoint(tiny_models: TinyModels, text_attention: NewAttention, tmp_path: Path) -> None:
    """Catches a loader that reads one file of several."""
    folder = tiny_models.target()
    tensors = list(load_file(folder / "model.safetensors").items())
    shutil.copy(folder / "config.json", tmp_path)
    file_to_tensors = {"model-1-of-2.safetensors": tensors[::2], "model-2-of-2.safetensors": tensors[1::2]}
    for file, part in file_to_tensors.items():
        save_file(dict(part), tmp_path / file)
    weight_map = {name: file for file, part in file_to_tensors.items() for name, _ in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    token_ids = torch.arange(9)
    logits, _ = run_native(tmp_path, token_ids, text_attention())
    expected, _ = run_native(folder, token_ids, text_attention())
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("part", ["q", "v"])
def test_bias_of_only_some_projections_is_refused(part: str, tiny_models: TinyModels) -> None:
    """Catches a fused bias that is dropped, or added to the wrong rows, when one of three is missing."""
    folder = tiny_models.target("Qwen2ForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.2.self_attn.{part}_proj.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"only some of .*layers\.2\.self_attn\.q_proj.* have a bias"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_and_misshapen_tensors_are_named(name: str, tiny_models: TinyModels) -> None:
    """Catches a model that starts with made-up weights, and an error that leaves the user searching."""
    folder = tiny_models.target()
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load(folder)
    tensors[name] = torch.cat([tensor, tensor])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {name} is \[{2 * tensor.shape[0]}.*expected \[{tensor.shape[0]}"):
        load(folder)


def test_size_that_cannot_be_split_is_refused(tiny_models: TinyModels) -> None:
    """Catches ranks that start, each with a wrong share, and fail in their first step."""
    from eyas.models.parallel import TensorParallel

    folder = tiny_models.target()
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 3 .* sizes that work: \[1, 2\]"):
        load_decoder(folder, torch.float32, torch.device("cpu"), TensorParallel(rank=0, size=3))
