"""What a new head starts from: the target's own weights, and noise that depends on the seed alone.

Letters: H hidden, V target vocabulary, Vd draft vocabulary.
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
from eyas.models.target_weights import TargetWeights

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
        return TargetOutput(
            norm=Checkpoint(folder).read("model.norm.weight", (config.hidden_size,), dtype),
            weight=TargetWeights(folder, config).output(dtype),
            eps=config.rms_norm_eps,
        )

    def restricted(self, token_ids: Tensor) -> TargetOutput:
        """The same over the ids `[Vd]` only, strictly increasing."""
        if token_ids.shape[0] == self.weight.shape[0]:
            return self
        return TargetOutput(self.norm, self.weight[token_ids].contiguous(), self.eps)

    def normed(self, states: Tensor) -> Tensor:
        """States after the final norm, `[T, H]`, from those before it."""
        return F.rms_norm(states, self.norm.shape, self.norm, self.eps)

    def logits(self, states: Tensor) -> Tensor:
        """Scores after each state before the final norm, `[T, H]` to `[T, V]`."""
        return F.linear(self.normed(states), self.weight)


class NewWeights:
    """Hands out the tensors of a new head.

    Args:
        compute_dtype: of frozen tensors, which need no float32 copy; trained ones are float32.
    """

    def __init__(self, folder: Path, target: DecoderConfig, compute_dtype: torch.dtype, seed: int) -> None:
        self.target = target
        self._weights = TargetWeights(folder, target)
        self._checkpoint = Checkpoint(folder)
        self._compute_dtype = compute_dtype
        self._generator = torch.Generator().manual_seed(seed)

    def embedding(self) -> Tensor:
        """The target's, frozen, `[V, H]`."""
        return self._weights.embedding(self._compute_dtype)

    def frozen_output(self) -> Tensor:
        """The target's output projection, frozen, `[V, H]`."""
        return self._weights.output(self._compute_dtype)

    def output(self) -> Tensor:
        """The target's output projection to start from, float32 `[V, H]`."""
        return self._weights.output(torch.float32).clone()

    def final_norm(self) -> Tensor:
        """Weight of the target's final norm, `[H]`."""
        return self._checkpoint.read("model.norm.weight", (self.target.hidden_size,), torch.float32)

    def noise(self, *shape: int) -> Tensor:
        """Small normal noise."""
        return torch.randn(shape, generator=self._generator) * _NOISE

    def last_layer(self, name: str, *shape: int) -> Tensor:
        """A weight of the target's last layer, such as `self_attn.q_proj`."""
        layer = f"model.layers.{self.target.num_layers - 1}"
        return self._checkpoint.read(f"{layer}.{name}.weight", shape, torch.float32)

    def last_block(self) -> dict[str, Tensor]:
        """All projections and norms of the target's last layer, under their published names."""
        target = self.target
        hidden, inner = target.hidden_size, target.intermediate_size
        query, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        return {f"{name}.weight": self.last_layer(name, *shape) for name, shape in shapes.items()}


def layer_config(target: DecoderConfig) -> dict[str, Any]:
    """Fields of a head's `config.json` that size it like one layer of the target."""
    return {
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
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
