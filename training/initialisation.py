"""A new EAGLE-3 head for a target: its config, and weights that start from the target's own.

Letters: H hidden, Vd draft vocabulary, V target vocabulary, A fused layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Config, Eagle3Head

_NOISE = 0.02
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The target from its last residual state on.

    Args:
        norm: weight of the final norm, `[H]`.
        weight: output projection, `[V, H]`.
    """

    norm: Tensor
    weight: Tensor
    eps: float

    @staticmethod
    def load(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> TargetOutput:
        """Read it from the target's folder."""
        checkpoint = Checkpoint(folder)
        name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return TargetOutput(
            norm=checkpoint.read("model.norm.weight", (config.hidden_size,), dtype),
            weight=checkpoint.read(name, (config.vocab_size, config.hidden_size), dtype),
            eps=config.rms_norm_eps,
        )

    def restricted(self, token_ids: Tensor) -> TargetOutput:
        """The same over the ids `[Vd]` only."""
        return TargetOutput(self.norm, self.weight[token_ids].contiguous(), self.eps)

    def logits(self, states: Tensor) -> Tensor:
        """Scores after each state before the final norm, `[T, H]` to `[T, V]`."""
        return F.linear(F.rms_norm(states, self.norm.shape, self.norm, self.eps), self.weight)


def head_config(target: DecoderConfig, aux_layers: tuple[int, ...], draft_vocab_size: int) -> dict[str, Any]:
    """`config.json` of a head in the published layout, sized like one layer of the target.

    Layer ids are written as residual-stream indices. SGLang, vLLM and Eyas all read them so, unless the first is 1,
    which some take for a layer's output.

    Raises:
        ValueError: for layers that cannot be written without that ambiguity.
    """
    if not aux_layers or aux_layers[0] == 1 or not all(0 <= index <= target.num_layers for index in aux_layers):
        raise ValueError(f"aux_layers: {aux_layers} must lie within the target and must not begin with 1")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_positions,
        **{name: target.raw[name] for name in _ROPE_FIELDS if target.raw.get(name) is not None},
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers), "use_aux_hidden_state": True},
    }


def new_head(
    folder: Path,
    target: DecoderConfig,
    aux_layers: tuple[int, ...],
    token_ids: Tensor,
    compute_dtype: torch.dtype,
    seed: int,
) -> Eagle3Head:
    """A trainable float32 head that begins as the target's last layer reading its last fused state.

    Args:
        token_ids: draft vocabulary, strictly increasing, int64 `[Vd]`.
        compute_dtype: of the frozen embedding, which is not trained and so needs no float32 copy.
    """
    config = Eagle3Config.from_dict(head_config(target, aux_layers, token_ids.shape[0]), target)
    checkpoint, generator = Checkpoint(folder), torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def last_layer(name: str, *shape: int) -> Tensor:
        return checkpoint.read(f"model.layers.{target.num_layers - 1}.{name}.weight", shape, torch.float32)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * _NOISE

    def projection(part: str, rows: int) -> Tensor:
        return torch.cat([noise(rows, hidden), last_layer(f"self_attn.{part}_proj", rows, hidden)], dim=1)

    output = TargetOutput.load(folder, target, torch.float32)
    embedding = checkpoint.read("model.embed_tokens.weight", (target.vocab_size, hidden), compute_dtype)
    fuse = noise(hidden, len(aux_layers) * hidden) * 0.1
    fuse[:, -hidden:] += torch.eye(hidden)
    tensors = {
        "fc.weight": fuse,
        "midlayer.self_attn.q_proj.weight": projection("q", query),
        "midlayer.self_attn.k_proj.weight": projection("k", kv),
        "midlayer.self_attn.v_proj.weight": projection("v", kv),
        "midlayer.self_attn.o_proj.weight": last_layer("self_attn.o_proj", hidden, query),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": last_layer("input_layernorm", hidden),
        "midlayer.post_attention_layernorm.weight": last_layer("post_attention_layernorm", hidden),
        "midlayer.mlp.gate_proj.weight": last_layer("mlp.gate_proj", inner, hidden),
        "midlayer.mlp.up_proj.weight": last_layer("mlp.up_proj", inner, hidden),
        "midlayer.mlp.down_proj.weight": last_layer("mlp.down_proj", hidden, inner),
        "norm.weight": output.norm,
        "lm_head.weight": output.weight[token_ids].clone(),
        "d2t": token_ids - torch.arange(token_ids.shape[0]),
    }
    return Eagle3Head(config, tensors, embedding, target.max_positions, trainable=True)
