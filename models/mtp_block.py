"""The decoder layer of an MTP module: the architecture's own, from `transformers`, with Eyas's attention.

Letters: T rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from eyas.kernels.attention_options import AttentionOptions
from eyas.models.attention import Attention
from eyas.models.head import HeadCache
from eyas.models.mtp_layout import MtpTensors
from eyas.models.tensor_source import TensorSource
from eyas.models.transformers_attention import ATTENTION_NAME, running

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_GROUPED_MULTIPLE = 8  # rows of a grouped matrix product must be whole units of 16 bytes, in bfloat16 as well
_FUSED_EXPERTS = "mlp.experts.gate_up_proj"
# Fields that describe the target's many layers or its storage; the module is one layer with full attention.
_NOT_OF_THE_BLOCK = ("model_type", "architectures", "auto_map", "quantization_config", "layer_types", "mlp_layer_types")


@dataclass(frozen=True, slots=True)
class _Family:
    """Where `transformers` keeps an architecture's layer.

    Args:
        module: folder of its code.
        prefix: of its classes.
        rotary: the rest of the name of its rotary embedding.
        expert_fields: config fields that make layer 0 one with experts and full attention.
        dense_fields: those that make it one with a dense MLP and full attention.
    """

    module: str
    prefix: str
    rotary: str
    expert_fields: dict[str, Any]
    dense_fields: dict[str, Any]

    def load(self, name: str) -> Any:
        return getattr(import_module(f"transformers.models.{self.module}.modeling_{self.module}"), self.prefix + name)


_FULL: dict[str, Any] = {"layer_types": ["full_attention"]}
_MOE_FIRST, _DENSE_FIRST = {"first_k_dense_replace": 0}, {"first_k_dense_replace": 1}
_MOE_EVERYWHERE: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_FAMILIES = {
    "deepseek_v3": _Family("deepseek_v3", "DeepseekV3", "RotaryEmbedding", _MOE_FIRST, _DENSE_FIRST),
    "glm4_moe": _Family("glm4_moe", "Glm4Moe", "RotaryEmbedding", _MOE_FIRST, _DENSE_FIRST),
    "qwen3_next": _Family(
        "qwen3_next", "Qwen3Next", "RotaryEmbedding", _FULL | _MOE_EVERYWHERE, _FULL | {"mlp_only_layers": [0]}
    ),
    "qwen3_5_text": _Family("qwen3_5", "Qwen3_5", "TextRotaryEmbedding", _FULL, _FULL),
    "qwen3_5_moe_text": _Family("qwen3_5_moe", "Qwen3_5Moe", "TextRotaryEmbedding", _FULL, _FULL),
    "qwen3": _Family("qwen3", "Qwen3", "RotaryEmbedding", _FULL, _FULL),
    "qwen2": _Family("qwen2", "Qwen2", "RotaryEmbedding", _FULL, _FULL),
    "llama": _Family("llama", "Llama", "RotaryEmbedding", {}, {}),
}
_ALIASES = {"mimo": "qwen2"}  # MiMo's own code derives its layer from Qwen2's and changes nothing in it


def block_config(raw: dict[str, Any], has_experts: bool) -> PretrainedConfig:
    """Config of a model whose layer 0 is the module's.

    Args:
        raw: `config.json` of the target.

    Raises:
        ValueError: naming the field.
    """
    model_type = _ALIASES.get(str(raw.get("model_type")), raw.get("model_type"))
    if model_type not in _FAMILIES:
        known = ", ".join(sorted({*_FAMILIES, *_ALIASES}))
        raise ValueError(f"model_type: the layer of {model_type} is not supported in an MTP module; supported: {known}")
    family = _FAMILIES[model_type]
    fields = {name: raw[name] for name in raw if name not in _NOT_OF_THE_BLOCK} | {"num_hidden_layers": 1}
    fields |= family.expert_fields if has_experts else family.dense_fields
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"config of the MTP module's layer: {' '.join(str(error).split())}") from None
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"rope_parameters.rope_type: {rope_type} changes its frequencies with the length of the text, which cached "
            "keys cannot follow; use default, linear, llama3 or yarn"
        )
    config._attn_implementation = ATTENTION_NAME
    widths = (config.hidden_size, getattr(config, "moe_intermediate_size", 0))
    config._experts_implementation = "eager" if any(width % _GROUPED_MULTIPLE for width in widths) else "grouped_mm"
    return config


def block_cache(config: PretrainedConfig) -> HeadCache:
    """What the layer caches; MLA hands attention its keys and values expanded, one of each per query head."""
    num_heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return HeadCache(1, num_heads, num_heads, key_dim, config.v_head_dim)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return HeadCache(1, num_heads, config.num_key_value_heads, head_dim, head_dim)


@dataclass(frozen=True, slots=True)
class _BlockRun:
    """One pass through the layer; see `ModelRun`. No mask was made, `attention` knows what each row sees."""

    attention: Attention

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Any
    ) -> Tensor:
        return self.attention(layer, query, key, value, options)

    def note_state(self, index: int, state: Tensor) -> None:
        pass


class MtpBlock(nn.Module):
    """One decoder layer and its rotary embedding, which is computed for the positions asked for: none is too far."""

    def __init__(self, config: PretrainedConfig) -> None:
        """The layer is left without memory; `load` gives it its weights."""
        super().__init__()
        family = _FAMILIES[config.model_type]
        with torch.device("meta"):
            self.layer = family.load("DecoderLayer")(config, 0)
        self.rotary = family.load(family.rotary)(config)
        self._exact = tuple(getattr(family.load("PreTrainedModel"), "_keep_in_fp32_modules_strict", None) or ())

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """`x [T, H]` to `[T, H]`, the residual included."""
        batch, position_ids = x[None], positions[None]
        with running(_BlockRun(attention)):
            out: Tensor = self.layer(
                batch,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=self.rotary(batch, position_ids),
            )
        return out[0]

    def norm(self, weight: Tensor, eps: float) -> nn.Module:
        """A norm as the architecture computes it over H: Qwen3-Next's weights are what is added to one."""
        made: nn.Module = type(self.layer.input_layernorm)(weight.numel(), eps=eps)
        made.load_state_dict({"weight": weight}, assign=True)
        return made

    def load(self, source: MtpTensors, dtype: torch.dtype, device: torch.device) -> None:
        """Take the layer's weights from `block.*`.

        Raises:
            ValueError: see `read_tensors`.
        """
        is_fused = f"block.{_FUSED_EXPERTS}" in source.names
        state = {}
        for name, tensor in self.layer.state_dict().items():
            is_exact = any(f".{name}".endswith(f".{kept}") for kept in self._exact)
            shapes = _published_shapes(name, tuple(tensor.shape), is_fused)
            pieces = source.read_all(shapes, torch.float32 if is_exact else dtype)
            state[name] = torch.cat(list(pieces.values())).view(tensor.shape).to(device)
        self.layer.load_state_dict(state, assign=True)
        self.rotary.to(device)

    def tensor_names(self, source: TensorSource) -> list[str]:
        """Names of all that `load` reads."""
        is_fused = f"block.{_FUSED_EXPERTS}" in source.names
        state = self.layer.state_dict()
        return [piece for name in state for piece in _published_shapes(name, tuple(state[name].shape), is_fused)]


def _published_shapes(name: str, shape: tuple[int, ...], is_fused: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that make a parameter when they are put below one another; experts are published one by one."""
    own = f"block.{name}"
    if is_fused or not name.startswith("mlp.experts."):
        return {own: shape}
    num_experts, rows, columns = shape
    parts = ["gate_proj", "up_proj"] if name == _FUSED_EXPERTS else ["down_proj"]
    return {
        f"block.mlp.experts.{expert}.{part}.weight": (rows // len(parts), columns)
        for expert in range(num_experts)
        for part in parts
    }
