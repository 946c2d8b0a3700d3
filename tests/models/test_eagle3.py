from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_config import Eagle3Config
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]

TOLERANCE = 1e-5  # float32, other order of summation than the transcription below
HIDDEN, VOCAB_SIZE, DRAFT_VOCAB_SIZE, NUM_PAIRS = 32, 61, 23, 40


def load(folder: Path, target: Path) -> Eagle3Head:
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    head = load_head(folder, weights, torch.float32, torch.device("cpu"))
    assert isinstance(head, Eagle3Head)
    return head


class PublishedHead:
    """The head as its authors' tensor list describes it: whole text at once, head by head, nothing fused or cached."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]

    def fuse(self, features: Tensor) -> Tensor:
        return features @ self.tensors["fc.weight"].T

    def states(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """States `[T, H]` of pairs 0 … T - 1: fused features or earlier states, and the tokens after them."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding[token_ids])
        fused = torch.cat([embedded, self.norm("midlayer.hidden_norm", hidden)], dim=-1)
        residual = hidden + self.attention(fused)
        x = self.norm("midlayer.post_attention_layernorm", residual)
        gate, up = self.linear("midlayer.mlp.gate_proj", x), self.linear("midlayer.mlp.up_proj", x)
        return residual + self.linear("midlayer.mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def logits(self, states: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("norm", states))

    def attention(self, fused: Tensor) -> Tensor:
        num_heads, num_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query, key, value = (self.linear(f"midlayer.self_attn.{part}_proj", fused) for part in "qkv")
        head_dim = query.shape[1] // num_heads
        causal = torch.ones(len(fused), len(fused), dtype=torch.bool).tril()
        heads = []
        for head in range(num_heads):
            shared = slice(
                head // (num_heads // num_kv_heads) * head_dim, (head // (num_heads // num_kv_heads) + 1) * head_dim
            )
            scores = self.rotate(query[:, head * head_dim : (head + 1) * head_dim]) @ self.rotate(key[:, shared]).T
            weights = (scores / head_dim**0.5).masked_fill(~causal, -torch.inf).softmax(-1)
            heads.append(weights @ value[:, shared])
        return self.linear("midlayer.self_attn.o_proj", torch.cat(heads, dim=-1))

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        frequencies = self.config["rope_theta"] ** -(torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None] * frequencies
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]


def random_pairs(seed: int) -> tuple[Tensor, Tensor]:
    """Target features `[T, 3 H]` and the tokens after them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_PAIRS, 3 * HIDDEN, generator=generator), torch.randint(
        VOCAB_SIZE, (NUM_PAIRS,), generator=generator
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 1}, {"head_dim": 16}, {"rope_theta": 50.0, "rms_norm_eps": 0.1}],
    ids=["plain", "one key-value head", "wide heads", "other constants"],
)
def test_head_equals_the_published_layer(
    options: dict[str, Any], tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches swapped halves, a norm on the wrong input, a residual taken after its norm, or a state after the norm."""
    target = tiny_models.target()
    folder = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE, **options)
    head, published = load(folder, target), PublishedHead(folder, target)
    features, token_ids = random_pairs(seed=0)
    positions = torch.arange(NUM_PAIRS)
    with torch.inference_mode():
        states = head.extend(features, token_ids, positions, text_attention())
        logits = head.logits(states)
    expected = published.states(published.fuse(features), token_ids)
    torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(logits, published.logits(expected), rtol=TOLERANCE, atol=10 * TOLERANCE)
    assert logits.shape == (NUM_PAIRS, DRAFT_VOCAB_SIZE)


def test_recurrent_steps_equal_the_published_layer(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a drafted state passed through `fc` or the final norm again, or placed at another position."""
    target = tiny_models.target()
    folder = tiny_models.head(target)
    head, published = load(folder, target), PublishedHead(folder, target)
    features, token_ids = random_pairs(seed=1)
    attention = text_attention()
    hidden = published.fuse(features)
    with torch.inference_mode():
        states = head.extend(features, token_ids, torch.arange(NUM_PAIRS), attention)[-1:]
        for step in range(4):
            drafted = torch.tensor([7 * step])
            states = head.step(states, drafted, torch.tensor([NUM_PAIRS + step]), attention)
            hidden = torch.cat([hidden, published.states(hidden, token_ids)[-1:]])
            token_ids = torch.cat([token_ids, drafted])
            expected = published.states(hidden, token_ids)[-1:]
            torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_candidates_are_target_tokens(tiny_models: TinyModels) -> None:
    """Catches `d2t` read as ids instead of offsets."""
    target = tiny_models.target()
    folder = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE)
    tensors = load_file(folder / "model.safetensors")
    assert load(folder, target).candidate_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_checkpoint_tensors_can_be_loaded_again(tiny_models: TinyModels) -> None:
    """Catches a trained head that is written with its fused projections in another order."""
    target = tiny_models.target()
    folder = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE, head_dim=16)
    written = load(folder, target).checkpoint_tensors()
    published = load_file(folder / "model.safetensors")
    assert written.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(written[name], tensor), name


def test_rope_is_sized_by_the_target(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a head that fails, or drafts nonsense, past its own file's `max_position_embeddings`."""
    target = tiny_models.target(max_position_embeddings=5000)
    head = load(tiny_models.head(target), target)
    with torch.inference_mode():
        states = head.step(torch.ones(1, HIDDEN), torch.tensor([1]), torch.tensor([4999]), text_attention())
    assert bool(states.isfinite().all())


def test_own_embedding_is_used(tiny_models: TinyModels) -> None:
    """Catches a head that was trained with its own embedding being fed the target's."""
    target = tiny_models.target()
    folder = tiny_models.head(target)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(9))
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load(folder, target).embedding, tensors["embed_tokens.weight"])


TARGET_CONFIG = DecoderConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
)
HEAD_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}


def nested(ids: list[int] | None) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


@pytest.mark.parametrize(
    ("fields", "aux_layers"),
    [
        ({}, (2, 12, 21)),
        ({"eagle_config": None}, (2, 12, 21)),
        (nested(None), (2, 12, 21)),
        (nested([]), (2, 12, 21)),
        (nested([1, 11, 21]), (2, 12, 22)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 11, 20]}, (2, 12, 21)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 12, 21]}, (2, 12, 21)),
        (nested([0, 12, 24]), (0, 12, 24)),
        (nested([22, 12, 1]), (22, 12, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 4, 5, 6]} | nested([1, 2, 3]), (3, 4, 5, 6)),
    ],
)
def test_aux_layer_conventions(fields: dict[str, Any], aux_layers: tuple[int, ...]) -> None:
    """Catches features captured one layer off, which no error shows: the head only stops being accepted."""
    assert Eagle3Config.from_dict(HEAD_CONFIG | fields, TARGET_CONFIG).aux_layers == aux_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_before_fc": True}, "norm_before_fc: true"),
        ({"fc_norm": True}, "fc_norm: true"),
        ({"norm_output": True}, "norm_output: true"),
        ({"eagle_config": {"norm_before_residual": True}}, "norm_before_residual: true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu .* only silu"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2 .* only 1"),
        ({"logit_scale": 0.5}, "logit_scale: 0.5"),
        ({"hidden_size": 64}, "hidden_size: the head reads states of 64, the target's are 32"),
        ({"target_hidden_size": 64}, "hidden_size: the head reads states of 64, the target's are 32"),
        ({"hidden_size": 64, "target_hidden_size": 32}, "hidden_size: 64 differs from the target's 32"),
        ({"vocab_size": 99}, "vocab_size: the head was made for 99, the target has 100"),
        (nested([1, 11, 24]), r"eagle_aux_hidden_state_layer_ids: \[1, 11, 24\] is outside the target's 24 layers"),
        (nested([-1, 11, 21]), "eagle_aux_hidden_state_layer_ids"),
        ({"intermediate_size": None}, "intermediate_size: is missing"),
        ({"model_type": None}, "model_type: is missing"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    """Catches a variant that would load and then hardly ever be accepted."""
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_dict(HEAD_CONFIG | fields, TARGET_CONFIG)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("midlayer.hidden_norm.weight", "tensor midlayer.hidden_norm.weight is missing"),
        ("fc.weight", "tensor fc.weight is missing"),
        ("d2t", "tensor d2t is missing, but draft_vocab_size is 23, not 61"),
    ],
)
def test_missing_tensors_are_named(name: str, message: str, tiny_models: TinyModels) -> None:
    """Catches made-up weights, and the first ids of the vocabulary taken for a draft vocabulary without a map."""
    check_refusal(lambda tensors: tensors.pop(name), message, tiny_models)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["d2t"].__setitem__(5, tensors["d2t"][4] - 1), "strictly increasing"),
        (lambda tensors: tensors["d2t"].__setitem__(-1, VOCAB_SIZE - DRAFT_VOCAB_SIZE + 1), "below 61"),
        (lambda tensors: tensors["d2t"].__setitem__(0, -1), "strictly increasing ids below 61"),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d and d2t name different tokens"),
        (lambda tensors: tensors["t2d"].zero_(), "t2d and d2t name different tokens"),
        (lambda tensors: tensors["fc.weight"].__setitem__((3, 4), torch.nan), r"tensor fc\.weight holds NaN"),
        (lambda tensors: tensors["norm.weight"].__setitem__(0, torch.inf), r"tensor norm\.weight holds NaN"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64)}), r"fc\.weight is \[32, 64\], .*\[32, 96\]"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 32)}), r"lm_head\.weight is \[61, 32\]"),
        (lambda tensors: tensors.update({"fc.bias": torch.zeros(32)}), r"tensor fc\.bias belongs to a variant"),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
            r"tensor midlayer\.self_attn\.q_proj\.bias belongs to a variant",
        ),
        (
            lambda tensors: tensors.update({"input_norm.weight": torch.zeros(96)}),
            r"tensor input_norm\.weight belongs to a variant",
        ),
    ],
    ids=[
        "d2t repeats an id",
        "d2t past the vocabulary",
        "d2t below zero",
        "t2d of other tokens",
        "t2d of no tokens",
        "nan",
        "infinity",
        "features of two layers",
        "whole vocabulary",
        "fc bias",
        "attention bias",
        "input norm",
    ],
)
def test_bad_tensors_are_named(
    change: Callable[[dict[str, Tensor]], None], message: str, tiny_models: TinyModels
) -> None:
    """Catches a damaged or unknown checkpoint that would load and draft tokens nobody accepts."""
    check_refusal(change, message, tiny_models)


def check_refusal(change: Callable[[dict[str, Tensor]], Any], message: str, tiny_models: TinyModels) -> None:
    target = tiny_models.target()
    folder = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(folder, target)


@pytest.mark.parametrize("maps", ["absent", "zero"])
def test_whole_vocabulary_needs_no_map(maps: str, tiny_models: TinyModels) -> None:
    """Catches refusing the older heads that draft from the whole vocabulary."""
    target = tiny_models.target()
    folder = tiny_models.head(target)
    tensors = load_file(folder / "model.safetensors")
    for name in ("d2t", "t2d"):
        tensor = tensors.pop(name)
        if maps == "zero":
            tensors[name] = torch.zeros_like(tensor)
    save_file(tensors, folder / "model.safetensors")
    assert load(folder, target).candidate_ids.tolist() == list(range(VOCAB_SIZE))
