"""What an engine's configs ask of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.kernels.backends import KernelNeed
from eyas.models.config import DecoderConfig
from eyas.models.eagle3_config import Eagle3Config
from eyas.workers.needs import kernel_need

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 64,
    "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "draft_vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(("options", "width"), [({}, 8192), ({"norm_before_fc": True}, 3 * 8192)])
def test_a_head_may_norm_longer_rows_than_its_target(options: dict[str, Any], width: int) -> None:
    """Catches a norm over all captured states side by side that its kernel refuses in the first prompt, not at
    start."""
    target = DecoderConfig.from_dict(FIELDS)
    head = Eagle3Config.from_dict(FIELDS | {"num_hidden_layers": 1} | options, target)
    need = kernel_need(KernelNeed("cuda", torch.bfloat16), target, head, draft_depth=3, width=4)
    assert need.sizes["hidden_size"] == width
