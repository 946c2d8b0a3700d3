"""Angles of rotary position embedding, half-split layout as in Hugging Face checkpoints.

Letters: T tokens, D head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# Variants whose frequencies depend on the running length: cached keys would need another rotation as the text grows.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Draft nodes may stand past the last position of the context; they are computed, never emitted.
_POSITIONS_PAST_CONTEXT = 512


class RotaryTable(nn.Module):
    """Cosines and signed sines for every position a request can reach.

    `kernels.fused.rotate` applies them: `x * cos + roll(x, D / 2) * signed_sin` is rotate-half with the sign folded
    into the table.
    """

    def __init__(self, raw_config: dict[str, Any], context_length: int) -> None:
        """Frequencies come from `transformers`, so that every scaling variant it knows (linear, llama3, yarn) works.

        Raises:
            ValueError: for a variant whose frequencies change with the length of the text.
        """
        super().__init__()
        try:
            known = AutoConfig.for_model(raw_config["model_type"], **_without(raw_config, "model_type"))
        except StrictDataclassError as error:
            raise ValueError(f"config.json: {' '.join(str(error).split())}") from None
        rope_type = (getattr(known, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope_type in _LENGTH_DEPENDENT:
            raise ValueError(
                f"rope_parameters.rope_type: {rope_type} is not supported; use default, linear, llama3 or yarn"
            )
        rotary = LlamaRotaryEmbedding(config=cast(LlamaConfig, known))  # reads only what the whole family has
        angles = torch.outer(
            torch.arange(context_length + _POSITIONS_PAST_CONTEXT, dtype=torch.float32), rotary.inv_freq.float()
        )
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        self.register_buffer("cos", torch.cat([cos, cos], dim=-1), persistent=False)
        self.register_buffer("signed_sin", torch.cat([-sin, sin], dim=-1), persistent=False)

    cos: Tensor
    signed_sin: Tensor

    def lookup(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of `positions [T]`, each `[T, 1, D]`; shared by all layers."""
        cos = self.cos.index_select(0, positions).to(dtype)
        sin = self.signed_sin.index_select(0, positions).to(dtype)
        return cos[:, None], sin[:, None]


def _without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in names}
