"""A random target of hidden size 32 and a corpus of random texts with random features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.training.dataset import Corpus
from eyas.training.eagle3_method import Eagle3Method
from eyas.training.initialisation import NewWeights
from eyas.training.shard import Shard

HIDDEN, VOCAB, NUM_LAYERS = 32, 64, 6
STOP = 2
LENGTHS = [12, 9, 14, 10, 11, 13]
PROMPT_LENGTHS = [4, 3, 6, 2, 5, 3]
NUM_STATES = 4  # three fused states and the last one


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with everything a new head is made from."""
    folder = tmp_path_factory.mktemp("target")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (32, HIDDEN),
        "self_attn.k_proj": (16, HIDDEN),
        "self_attn.v_proj": (16, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 32),
        "mlp.gate_proj": (48, HIDDEN),
        "mlp.up_proj": (48, HIDDEN),
        "mlp.down_proj": (HIDDEN, 48),
    }
    tensors: dict[str, torch.Tensor] = {}
    for index, outside in ((NUM_LAYERS - 1, True), (NUM_LAYERS - 2, False)):
        layer = f"model.layers.{index}"
        matrices = {"model.embed_tokens": (VOCAB, HIDDEN)} if outside else {}
        matrices |= {f"{layer}.{name}": shape for name, shape in shapes.items()}
        norms = ["model.norm"] if outside else []
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        tensors |= {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in matrices.items()}
        tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> DecoderConfig:
    return DecoderConfig.from_folder(target_folder)


@pytest.fixture(scope="session")
def shard() -> Shard:
    """Six conversations; no answer holds the stop token."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    return Shard(
        token_ids=torch.randint(STOP + 1, VOCAB, (total,), generator=generator),
        features=torch.randn(total, NUM_STATES * HIDDEN, generator=generator).to(torch.bfloat16),
        is_answer=torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPT_LENGTHS, strict=True)]),
        lengths=LENGTHS,
    )


@pytest.fixture(scope="session")
def corpus(shard: Shard) -> Corpus:
    return Corpus([shard], max_length=64, stop_token_id=STOP)


@pytest.fixture(scope="session")
def new_eagle3(target: DecoderConfig, target_folder: Path) -> Callable[..., Eagle3Head]:
    """Makes an EAGLE-3 head for a draft vocabulary."""

    def make(
        token_ids: Tensor,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        aux_layers: tuple[int, ...] = (2, 3, 5),
        num_layers: int = 1,
    ) -> Eagle3Head:
        weights = NewWeights(target_folder, target, dtype, seed)
        return Eagle3Method(aux_layers, num_layers).new_head(weights, token_ids, num_levels=3)

    return make
