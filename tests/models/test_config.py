from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.models.config import DecoderConfig, read_json

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 1024,
}


def test_fields_left_out_get_their_meaning() -> None:
    """Catches defaults that differ from the ones checkpoints are written under."""
    config = DecoderConfig.from_dict(LLAMA)
    assert (config.head_dim, config.num_kv_heads) == (4, 6)
    assert (config.tie_word_embeddings, config.qk_norm) == (False, False)
    older = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert DecoderConfig.from_dict(older | {"head_dim": None}).num_kv_heads == 12
    assert DecoderConfig.from_dict(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"architectures: MixtralForCausalLM .* for model_type llama"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures: LlamaForCausalLMEagle3 is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "it is not the text generator"),
        ({"architectures": None}, r"architectures: \? is not supported"),
        ({"architectures": []}, r"architectures: \? is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide num_attention_heads 12"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"model_type": None}, "model_type: is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings: is missing"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    """Catches an option that is ignored, which would serve another model's text, and errors without a name."""
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict(LLAMA | changes)


def of(architecture: str, model_type: str, **options: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [architecture], "model_type": model_type} | options


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (of("JambaForCausalLM", "jamba"), "layer_types: JambaForCausalLM has linear_attention layers.*recurrent"),
        (of("MambaForCausalLM", "mamba"), "layer_types: MambaForCausalLM has linear_attention"),
        (of("Qwen3NextForCausalLM", "qwen3_next"), "layer_types: Qwen3NextForCausalLM has linear_attention"),
        (of("DeepseekV32ForCausalLM", "deepseek_v32"), "layer_types: DeepseekV32ForCausalLM has indexed_attention"),
        (of("Llama4ForCausalLM", "llama4_text"), "layer_types: Llama4ForCausalLM has chunked_attention layers"),
        (of("Gemma4ForCausalLM", "gemma4_text", head_dim=8, global_head_dim=16), "head_dim: the layers of Gemma4"),
        (of("Qwen2VLForConditionalGeneration", "qwen2_vl"), "generates text from other inputs only"),
        (of("T5ForConditionalGeneration", "t5"), "T5ForConditionalGeneration is an encoder-decoder"),
        (of("SomeForCausalLM", "some"), "model_type: some of SomeForCausalLM cannot be read"),
        (of("FalconForCausalLM", "falcon", alibi=True), "alibi: FalconForCausalLM adds position biases"),
        (of("Phi3ForCausalLM", "phi3", pad_token_id=0, rope_parameters={"rope_type": "longrope", "factor": 2.0,
            "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0],
            "original_max_position_embeddings": 512}), "rope_type: longrope of Phi3ForCausalLM"),
        (of("Gemma3ForCausalLM", "gemma3_text", rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}), "rope_type: dynamic"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_branch_is_refused_by_its_file(raw: dict[str, Any], message: str) -> None:
    """Catches loading gigabytes before saying no, and states, chunks or rotations that a tree would get wrong."""
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict(raw)


@pytest.mark.parametrize(
    "raw",
    [
        of("MistralForCausalLM", "mistral", sliding_window=512),
        of("Qwen2ForCausalLM", "qwen2", sliding_window=512, use_sliding_window=True),
        of("LlamaForCausalLM", "llama", mlp_bias=True),
        of("Qwen3ForCausalLM", "qwen3", hidden_act="gelu", head_dim=16),
        of("MixtralForCausalLM", "mixtral"),
    ],
    ids=lambda raw: raw["model_type"],
)
def test_what_only_transformers_has_goes_there(raw: dict[str, Any]) -> None:
    """Catches an option that the native decoder would ignore, and ranks promised for a model that cannot be split."""
    config = DecoderConfig.from_dict(raw)
    assert not config.is_native
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 12, 6)
    assert config.head_dim == config.value_head_dim == raw.get("head_dim", 4)
    assert config.tensor_parallel_sizes() == [1]
    config.check_tensor_parallel(1)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size: 2 cannot split .*; only LlamaForCausalLM, Mistral.* use 1"
    ):
        config.check_tensor_parallel(2)


def test_expanded_heads_of_latent_attention() -> None:
    """Catches a cache sized by the compressed keys, or by rotary parts alone, of an MLA model."""
    sizes = {"kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    config = DecoderConfig.from_dict(of("DeepseekV3ForCausalLM", "deepseek_v3", num_key_value_heads=12, **sizes))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim) == (12, 12, 10, 5)


def test_text_decoder_of_a_multimodal_file() -> None:
    """Catches sizes of the outer config, or of its defaults, taken for the text decoder's."""
    text = {name: LLAMA[name] for name in LLAMA if name not in ("architectures", "model_type")}
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text | {"model_type": "gemma3_text", "head_dim": 16},
    }
    config = DecoderConfig.from_dict(raw)
    assert (config.hidden_size, config.num_layers, config.head_dim, config.max_positions) == (48, 30, 16, 1024)
    assert config.tie_word_embeddings


def test_final_index_follows_the_residual_states() -> None:
    """Catches an index that a residual-stream state already has."""
    assert DecoderConfig.from_dict(LLAMA).final_index == 31


@pytest.mark.parametrize(
    "raw",
    [
        of("MistralForCausalLM", "mistral", sliding_window=None),
        of("MistralForCausalLM", "mistral", sliding_window=1024),
        of("MistralForCausalLM", "mistral", sliding_window=512, use_sliding_window=False),
        of("Qwen2ForCausalLM", "qwen2", sliding_window=512),
        of("Qwen3ForCausalLM", "qwen3", sliding_window=512, use_sliding_window=False),
        of("LlamaForCausalLM", "llama", sliding_window=512),
    ],
)
def test_window_without_effect_stays_native(raw: dict[str, Any]) -> None:
    """Catches a window that the file carries and the model does not use sending it to the slower implementation."""
    assert DecoderConfig.from_dict(raw).is_native


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [1, 2, 3, 6]),
        ({"intermediate_size": 32}, [1, 2]),
        ({"num_key_value_heads": 1}, [1]),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, [1, 3]),
    ],
)
def test_tensor_parallel_sizes(changes: dict[str, Any], sizes: list[int]) -> None:
    """Catches a size that would cut through a head or leave MLP columns to nobody."""
    config = DecoderConfig.from_dict(LLAMA | changes)
    assert config.tensor_parallel_sizes() == sizes
    for size in range(1, 9):
        if size in sizes:
            config.check_tensor_parallel(size)
        else:
            with pytest.raises(ValueError, match=rf"tensor_parallel_size: {size} .*{sizes[-1]}\]"):
                config.check_tensor_parallel(size)


def test_default_aux_layers() -> None:
    """Catches another default than the one EAGLE-3 heads without layer ids were trained with."""
    assert DecoderConfig.from_dict(LLAMA | {"num_hidden_layers": 32}).default_aux_layers() == (2, 16, 29)
    assert DecoderConfig.from_dict(LLAMA).default_aux_layers() == (2, 15, 27)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{'hidden_size': 1}", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "must hold a JSON object, found list"),
    ],
)
def test_unreadable_files_are_named(content: str | None, message: str, tmp_path: Path) -> None:
    """Catches a traceback of the JSON parser that does not say which file it read."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        DecoderConfig.from_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "config.json")
