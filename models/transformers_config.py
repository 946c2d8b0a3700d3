"""What Eyas needs to know of an architecture that only `transformers` implements, and what it cannot serve of them.

Refused here is what a file already shows; `models.transformers_probe` and `workers.self_check` look at the model.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")
_CHUNKED = "chunked_attention"


def decoder_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The sizes of `DecoderConfig` from a `config.json`; a multimodal model's are those of its text decoder.

    Raises:
        ValueError: naming the field, the reason and the alternative, for an architecture that cannot be served.
    """
    architecture = (raw.get("architectures") or ["?"])[0]
    config = _known_config(raw, architecture)
    text = config.get_text_config(decoder=True)
    _check_layers(text, architecture)
    _check_positions(text, architecture)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    for name in names:
        if not isinstance(getattr(text, name, None), int):
            raise ValueError(f"{name}: is missing from the config.json of {architecture}")
    if not _has_one_size(text):
        raise ValueError(
            f"head_dim: the layers of {architecture} have heads of several sizes, and a pool of pages has one; use a "
            "model whose layers are alike"
        )
    num_heads, head_dim = text.num_attention_heads, getattr(text, "head_dim", None)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = head_dim or text.hidden_size // num_heads
    value_head_dim = getattr(text, "v_head_dim", None) or head_dim
    if getattr(text, "kv_lora_rank", None):  # MLA: attention gets its keys expanded, a pair of parts per query head
        num_kv_heads = num_heads
        head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None) or 0,
        "num_layers": text.num_hidden_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "max_positions": text.max_position_embeddings,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "qk_norm": False,
    }


def _has_one_size(text: Any) -> bool:
    """Whether all layers have the same heads; where they vary, `transformers` raises on reading the field for all."""
    try:
        _ = [getattr(text, name, None) for name in ("head_dim", "num_attention_heads", "num_key_value_heads")]
    except RuntimeError:
        return False
    return True


def _known_config(raw: dict[str, Any], architecture: str) -> Any:
    model_type = raw.get("model_type")
    if model_type is None:
        raise ValueError("model_type: is missing from config.json")
    try:
        config = AutoConfig.for_model(model_type, **{name: raw[name] for name in raw if name != "model_type"})
    except ValueError as error:
        raise ValueError(f"model_type: {model_type} of {architecture} cannot be read: {error}") from None
    if config.is_encoder_decoder:
        raise ValueError(
            f"architectures: {architecture} is an encoder-decoder, which has no one text that trees could continue; "
            "use a decoder-only model"
        )
    generators = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if architecture not in [names.get(model_type) for names in generators]:
        raise ValueError(
            f"architectures: {architecture} is not supported: it is not the text generator that transformers "
            f"{transformers.__version__} has for model_type {model_type}, and code from a model's folder is never run"
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"architectures: {architecture} generates text from other inputs only, transformers has no causal language "
            "model for it; use the text model it is built on"
        )
    return config


def _check_layers(text: Any, architecture: str) -> None:
    layer_types = set(getattr(text, "layer_types", None) or ())
    unknown = sorted(layer_types.difference(_SERVED_LAYER_TYPES))
    if _CHUNKED in unknown:
        raise ValueError(
            f"layer_types: {architecture} has {_CHUNKED} layers, whose chunks Eyas's masks do not express; use a model "
            "with full or sliding-window attention"
        )
    if unknown:
        raise ValueError(
            f"layer_types: {architecture} has {', '.join(unknown)} layers, which keep more than keys and values (a "
            "recurrent state, an index); that cannot branch with a draft tree nor be rolled back; use a model with "
            "attention in every layer"
        )


def _check_positions(text: Any, architecture: str) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer_type = parameters if parameters and all(isinstance(each, dict) for each in parameters.values()) else {}
    for each in per_layer_type.values() or [parameters]:
        if each.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"rope_parameters.rope_type: {each['rope_type']} of {architecture} changes its frequencies with the "
                "length of the text, which cached keys cannot follow; use default, linear, llama3 or yarn"
            )
    if getattr(text, "alibi", False):
        raise ValueError(
            f"alibi: {architecture} adds position biases to its attention, which Eyas does not; use a model with "
            "rotary positions"
        )
