from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleHead
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.target_weights import TargetWeights
from eyas.workers.sampler import NoiseRanker, RowSampling
from eyas.workers.sampling import SamplingParams

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]

TOLERANCE = 1e-5  # float32, other order of summation than the transcription below
HIDDEN, VOCAB_SIZE, NUM_PAIRS = 32, 61, 40


def load(folder: Path, target: Path, options: HeadOptions | None = None) -> EagleHead:
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    head = load_head(folder, weights, torch.float32, torch.device("cpu"), options)
    assert isinstance(head, EagleHead)
    return head


class PaperHead:
    """The head as the paper's formulas have it: fc over (embedding, feature), decoder layer, the target's LM head."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        of_target = load_file(target / "model.safetensors")
        self.embedding = self.tensors.get("embed_tokens.weight", of_target["model.embed_tokens.weight"])
        self.lm_head = of_target["lm_head.weight"]

    def states(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """Next features `[T, H]` of pairs 0 … T - 1."""
        embedded = self.norm("embedding_layernorm", self.embedding[token_ids])
        hidden = self.linear("fc", torch.cat([embedded, self.norm("hidden_states_layernorm", features)], dim=1))
        for index in range(self.config["num_hidden_layers"]):
            layer = f"layers.{index}"
            hidden = hidden + self.attention(layer, self.norm(f"{layer}.input_layernorm", hidden))
            x = self.norm(f"{layer}.post_attention_layernorm", hidden)
            gate, up = self.linear(f"{layer}.mlp.gate_proj", x), self.linear(f"{layer}.mlp.up_proj", x)
            hidden = hidden + self.linear(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.lm_head.T

    def attention(self, layer: str, x: Tensor) -> Tensor:
        query, key, value = (
            self.linear(f"{layer}.self_attn.{part}_proj", x).unflatten(1, (-1, 8)).transpose(0, 1) for part in "qkv"
        )
        query, key = self.rotate(query), self.rotate(key).repeat_interleave(2, 0)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        is_hidden = (distance < 0) | (distance >= self.config.get("sliding_window", len(x)))
        scores = (query @ key.transpose(1, 2) / 8**0.5).masked_fill(is_hidden, -torch.inf)
        attended = scores.softmax(-1) @ value.repeat_interleave(2, 0)
        return self.linear(f"{layer}.self_attn.o_proj", attended.transpose(0, 1).flatten(1))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        first, second = x[..., :4], x[..., 4:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The norm, or nothing where the head has none of this name."""
        if f"{name}.weight" not in self.tensors:
            return x
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]


def second_layer() -> dict[str, tuple[int, ...]]:
    return {
        "layers.1.self_attn.q_proj.weight": (32, 32),
        "layers.1.self_attn.k_proj.weight": (16, 32),
        "layers.1.self_attn.v_proj.weight": (16, 32),
        "layers.1.self_attn.o_proj.weight": (32, 32),
        "layers.1.mlp.gate_proj.weight": (40, 32),
        "layers.1.mlp.up_proj.weight": (40, 32),
        "layers.1.mlp.down_proj.weight": (32, 40),
        "layers.1.input_layernorm.weight": (32,),
        "layers.1.post_attention_layernorm.weight": (32,),
    }


@dataclass(frozen=True)
class Variant:
    """A published variant: config fields and tensors beside the usual ones."""

    options: dict[str, Any] = field(default_factory=dict)
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def write(self, tiny_models: TinyModels, target: Path) -> Path:
        return tiny_models.changed(tiny_models.eagle_head(target, **self.options), self.added)


VARIANTS = {
    "Llama 3": Variant(),
    "Vicuna, with a bias that its config denies": Variant({}, {"fc.bias": (32,)}),
    "Qwen2": Variant(
        {}, {f"layers.0.self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", 32), ("k", 16), ("v", 16))}
    ),
    "two layers": Variant({"num_hidden_layers": 2}, second_layer()),
    "HASS": Variant(
        {"add_para_norm": True}, {"embedding_layernorm.weight": (32,), "hidden_states_layernorm.weight": (32,)}
    ),
    "own embedding": Variant({}, {"embed_tokens.weight": (61, 32)}),
    "window": Variant({"sliding_window": 5}),
}


def random_pairs(seed: int) -> tuple[Tensor, Tensor]:
    """Target features `[T, H]` and the tokens after them."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(NUM_PAIRS, HIDDEN, generator=generator)
    return features, torch.randint(VOCAB_SIZE, (NUM_PAIRS,), generator=generator)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_head_equals_the_papers_formulas(
    variant: Variant, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches swapped halves, a norm too many, a bias dropped or made up, a drafted feature that is normed."""
    target = tiny_models.target()
    folder = variant.write(tiny_models, target)
    head, paper = load(folder, target), PaperHead(folder, target)
    features, token_ids = random_pairs(seed=0)
    attention = text_attention()
    with torch.inference_mode():
        states = head.extend(features, token_ids, torch.arange(NUM_PAIRS), attention)
        expected = paper.states(features, token_ids)
        torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(head.logits(states), paper.logits(expected), rtol=TOLERANCE, atol=10 * TOLERANCE)
        states = states[-1:]
        for step in range(4):
            drafted = torch.tensor([7 * step])
            features = torch.cat([features, expected[-1:]])
            token_ids = torch.cat([token_ids, drafted])
            states = head.step(states, drafted, torch.tensor([NUM_PAIRS + step]), attention)
            expected = paper.states(features, token_ids)
            torch.testing.assert_close(states, expected[-1:], rtol=TOLERANCE, atol=2 * TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_checkpoint_tensors_can_be_loaded_again(variant: Variant, tiny_models: TinyModels) -> None:
    """Catches a trained head that is written with its fused projections in another order, or without a part."""
    target = tiny_models.target()
    folder = variant.write(tiny_models, target)
    written = load(folder, target).checkpoint_tensors()
    published = load_file(folder / "model.safetensors")
    published.pop("embed_tokens.weight", None)
    assert written.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(written[name], tensor), name


def test_final_state_of_the_target_is_read(tiny_models: TinyModels) -> None:
    """Catches features taken before the final norm, with which the head is hardly ever accepted."""
    target = tiny_models.target()
    folder = tiny_models.eagle_head(target)
    config = normalise_head(open_head(folder), DecoderConfig.from_folder(target))
    assert config.capture == load(folder, target).capture == (5,)
    assert config.plausible_captures == ((5,),)
    with pytest.raises(ValueError, match="aux_layers: an EAGLE-1 head reads the target's final state alone"):
        normalise_head(open_head(folder), DecoderConfig.from_folder(target), HeadOptions(aux_layers=(1, 2, 3)))


def test_token_map_restricts_the_candidates(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches scores of one token standing for another (FR-Spec)."""
    target = tiny_models.target()
    folder = tiny_models.eagle_head(target)
    ids = [40, 3, 17, 60, 0]
    (tmp_path / "map.json").write_text(json.dumps(ids))
    whole, restricted = load(folder, target), load(folder, target, HeadOptions(token_map=str(tmp_path / "map.json")))
    states = random_pairs(seed=3)[0]
    assert restricted.candidate_ids.tolist() == sorted(ids)
    torch.testing.assert_close(restricted.logits(states), whole.logits(states)[:, sorted(ids)])
    ranker = NoiseRanker(RowSampling([SamplingParams()] * NUM_PAIRS, [0] * NUM_PAIRS), 2)
    best = restricted.candidates(states, range(1, 2), ranker).tokens[:, 0]
    assert torch.equal(best, restricted.candidate_ids[restricted.logits(states).argmax(1)])


@pytest.mark.parametrize(
    ("options", "added", "message"),
    [
        ({"hidden_size": 64}, {}, "hidden_size: the head was made for 64, the target has 32"),
        ({"vocab_size": 60}, {}, "vocab_size: the head was made for 60, the target has 61"),
        ({"add_para_norm": True}, {}, "add_para_norm: is true, but the head's files hold no embedding_layernorm"),
        ({"hidden_act": "gelu"}, {}, "hidden_act: gelu"),
        ({}, {"enorm.weight": (32,)}, "tensor enorm.weight belongs to a variant of EAGLE"),
        ({}, {"layers.0.self_attn.v_proj.bias": (16,)}, "layers.0.self_attn.q_proj.bias is missing"),
    ],
)
def test_bad_heads_are_refused(
    options: dict[str, Any], added: dict[str, tuple[int, ...]], message: str, tiny_models: TinyModels
) -> None:
    """Catches a head of another target, or a part of a head that is left unused."""
    target = tiny_models.target()
    with pytest.raises(ValueError, match=message):
        load(tiny_models.changed(tiny_models.eagle_head(target, **options), added), target)
