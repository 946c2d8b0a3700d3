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
        ({"architectures": ["MixtralForCausalLM"]}, r"architectures: MixtralForCausalLM .*LlamaForCausalLM"),
        ({"architectures": None}, r"architectures: \? is not supported"),
        ({"architectures": []}, r"architectures: \? is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"mlp_bias": True}, "mlp_bias: true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised"),
        ({"sliding_window": 512}, r"sliding_window: 512 .* lower max_position_embeddings to 512"),
        ({"sliding_window": 512, "use_sliding_window": True}, "sliding_window: 512"),
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


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 1024},
        {"sliding_window": 4096},
        {"sliding_window": 512, "use_sliding_window": False},
    ],
)
def test_window_without_effect_is_accepted(changes: dict[str, Any]) -> None:
    """Catches refusing Qwen2 and Mistral files that carry a window they do not use."""
    assert DecoderConfig.from_dict(LLAMA | changes).max_positions == 1024


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
