"""Targets and heads of real shapes with random weights, made on the device: their speed does not depend on the values.

Letters: H hidden, I MLP width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_config import Eagle3Config
from eyas.models.layers import GatedMLP, RMSNorm, SelfAttention
from eyas.models.linear import Linear
from eyas.models.llama import DecoderLayer, LlamaDecoder
from eyas.models.parallel import TensorParallel
from eyas.models.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a target and of the EAGLE-3 head that drafts for it."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    draft_vocab_size: int
    max_positions: int

    @property
    def target_config(self) -> DecoderConfig:
        return DecoderConfig.from_dict(self._fields | {"num_hidden_layers": self.num_layers})

    @property
    def head_config(self) -> Eagle3Config:
        fields = self._fields | {"num_hidden_layers": 1, "draft_vocab_size": self.draft_vocab_size}
        return Eagle3Config.from_dict(fields, self.target_config)

    @property
    def _fields(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }


LLAMA_3_8B = ModelShape("Llama-3-8B", 4096, 14336, 32, 32, 8, 128256, 32000, 40960)
SMOLLM2_135M = ModelShape("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, 8192, 8192)
TINY = ModelShape("tiny", 64, 96, 8, 4, 2, 320, 256, 2048)


class RandomWeights:
    """Draws the tensors of one model, each scaled by its inputs so that activations neither vanish nor overflow."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        size = (outputs, inputs)
        weight = torch.randn(size, dtype=self._dtype, device=self._device, generator=self._generator)
        return weight.mul_(gain * inputs**-0.5)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)


def random_target(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, num_layers: int | None = None
) -> LlamaDecoder:
    """A target whose logits are wide apart, so that the best token does not hang on a rounding error.

    Args:
        num_layers: None for as many as the shape has; 0 for a target of which only the embedding is wanted.
    """
    config, weights = shape.target_config, RandomWeights(dtype, device)
    hidden, inner, parallel = config.hidden_size, config.intermediate_size, TensorParallel()
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm() -> RMSNorm:
        return RMSNorm(weights.ones(hidden), config.rms_norm_eps)

    def layer(index: int) -> DecoderLayer:
        attention = SelfAttention(
            layer=index,
            qkv=Linear(weights.matrix(query + 2 * kv, hidden)),
            output=Linear(weights.matrix(hidden, query)),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        mlp = GatedMLP(Linear(weights.matrix(2 * inner, hidden)), Linear(weights.matrix(hidden, inner)))
        return DecoderLayer(norm(), attention, norm(), mlp)

    return LlamaDecoder(
        config=config,
        embedding=weights.matrix(config.vocab_size, hidden, gain=hidden**0.5),
        layers=[layer(index) for index in range(config.num_layers if num_layers is None else num_layers)],
        norm=norm(),
        output=Linear(weights.matrix(config.vocab_size, hidden, gain=3.0)),
        rotary=RotaryTable(config.raw, config.max_positions).to(device),
        parallel=parallel,
    ).eval()


def random_head(shape: ModelShape, target: LlamaDecoder) -> Eagle3Head:
    """An EAGLE-3 head over the embedding of `target`, whose draft vocabulary is spread over all ids."""
    config = shape.head_config
    weights = RandomWeights(target.dtype, target.device, seed=1)
    stack = config.layers
    hidden, inner = stack.hidden_size, stack.intermediate_size
    query, kv = stack.num_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim
    tensors = {
        "fc.weight": weights.matrix(hidden, config.feature_size),
        "midlayer.self_attn.q_proj.weight": weights.matrix(query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weights.matrix(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weights.matrix(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weights.matrix(hidden, query),
        "midlayer.mlp.gate_proj.weight": weights.matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": weights.matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": weights.matrix(hidden, inner),
        "lm_head.weight": weights.matrix(config.draft_vocab_size, hidden, gain=3.0),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": weights.ones(hidden) for name in norms}
    spread = torch.linspace(0, shape.vocab_size - 1, config.draft_vocab_size, dtype=torch.float64).long()
    tensors["d2t"] = (spread - torch.arange(config.draft_vocab_size)).to(target.device)
    return Eagle3Head(config, tensors, target.embedding.data, shape.max_positions)


def weight_bytes(target: LlamaDecoder) -> int:
    """What a pass over the target reads at least once: every weight but the embedding, of which it reads some rows."""
    return sum(weight.nbytes for weight in target.parameters()) - target.embedding.nbytes
