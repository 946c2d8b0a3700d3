from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
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
        raw = json.loads((folder / "config.json").read_text())
        self.config = raw | (raw.get("eagle_config") or {})
        self.tensors = load_file(folder / "model.safetensors")
        shared = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.embedding = self.tensors.get("embed_tokens.weight", shared)
        self.num_layers = 1 + sum(name.endswith("input_layernorm.weight") for name in self.tensors if "layers." in name)

    def fuse(self, features: Tensor) -> Tensor:
        if "input_norm.weight" in self.tensors:
            features = self.norm("input_norm", features)
        if "fc_norm.0.weight" in self.tensors:
            parts = features.chunk(3, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=-1)
        return self.linear("fc", features) if "fc.weight" in self.tensors else features

    def states(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """States `[T, H]` of pairs 0 … T - 1: fused features or earlier states, and the tokens after them."""
        embedded, normed = (
            self.norm("midlayer.input_layernorm", self.embedding[token_ids]),
            self.norm("midlayer.hidden_norm", hidden),
        )
        if self.config.get("norm_before_residual"):
            hidden = normed
        hidden = hidden + self.attention("midlayer", torch.cat([embedded, normed], dim=-1))
        hidden = hidden + self.mlp("midlayer", hidden)
        for index in range(1, self.num_layers):
            layer = f"layers.{index}"
            hidden = hidden + self.attention(layer, self.norm(f"{layer}.input_layernorm", hidden))
            hidden = hidden + self.mlp(layer, hidden)
        return self.norm("norm", hidden) if self.config.get("norm_output") else hidden

    def logits(self, states: Tensor) -> Tensor:
        normed = states if self.config.get("norm_output") else self.norm("norm", states)
        return self.linear("lm_head", normed) * self.config.get("logit_scale", 1.0)

    def mlp(self, layer: str, hidden: Tensor) -> Tensor:
        x = self.norm(f"{layer}.post_attention_layernorm", hidden)
        gate, up = self.linear(f"{layer}.mlp.gate_proj", x), self.linear(f"{layer}.mlp.up_proj", x)
        return self.linear(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def attention(self, layer: str, x: Tensor) -> Tensor:
        num_heads, num_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query, key, value = (self.linear(f"{layer}.self_attn.{part}_proj", x) for part in "qkv")
        head_dim = query.shape[1] // num_heads
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = (distance < 0) | (distance >= self.config.get("sliding_window", len(x)))
        heads = []
        for head in range(num_heads):
            shared = slice(
                head // (num_heads // num_kv_heads) * head_dim, (head // (num_heads // num_kv_heads) + 1) * head_dim
            )
            own_query, own_key = query[:, head * head_dim : (head + 1) * head_dim], key[:, shared]
            if f"{layer}.self_attn.q_norm.weight" in self.tensors:
                own_query = self.norm(f"{layer}.self_attn.q_norm", own_query)
                own_key = self.norm(f"{layer}.self_attn.k_norm", own_key)
            scores = self.rotate(own_query) @ self.rotate(own_key).T
            weights = (scores / head_dim**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            heads.append(weights @ value[:, shared])
        return self.linear(f"{layer}.self_attn.o_proj", torch.cat(heads, dim=-1))

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        frequencies = self.config["rope_theta"] ** -(torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None] * frequencies
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]


def random_pairs(seed: int, width: int = 3 * HIDDEN) -> tuple[Tensor, Tensor]:
    """Target features `[T, A * Ht]` and the tokens after them."""
    generator = torch.Generator().manual_seed(seed)
    features = 2 * torch.randn(NUM_PAIRS, width, generator=generator)
    return features, torch.randint(VOCAB_SIZE, (NUM_PAIRS,), generator=generator)


def second_layer(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (32, 32),
        f"{prefix}.self_attn.k_proj.weight": (16, 32),
        f"{prefix}.self_attn.v_proj.weight": (16, 32),
        f"{prefix}.self_attn.o_proj.weight": (32, 32),
        f"{prefix}.mlp.gate_proj.weight": (40, 32),
        f"{prefix}.mlp.up_proj.weight": (40, 32),
        f"{prefix}.mlp.down_proj.weight": (32, 40),
        f"{prefix}.input_layernorm.weight": (32,),
        f"{prefix}.post_attention_layernorm.weight": (32,),
    }


@dataclass(frozen=True)
class Variant:
    """A published variant: config fields, tensors beside or instead of the usual ones, tensors it lacks."""

    options: dict[str, Any] = field(default_factory=dict)
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def write(self, tiny_models: TinyModels, target: Path) -> Path:
        folder = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE, **self.options)
        return tiny_models.changed(folder, self.added, self.removed)


def attention_biases(layer: str = "midlayer") -> dict[str, tuple[int, ...]]:
    return {f"{layer}.self_attn.{part}_proj.bias": (rows,) for part, rows in zip("qkvo", (32, 16, 16, 32), strict=True)}


FC_NORMS = {f"fc_norm.{index}.weight": (32,) for index in range(3)}
IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
FINAL_STATE = {"eagle_config": {"use_aux_hidden_state": False}}
VARIANTS = {
    "plain": Variant(),
    "one key-value head": Variant({"num_key_value_heads": 1}),
    "wide heads": Variant({"head_dim": 16}),
    "other constants": Variant({"rope_theta": 50.0, "rms_norm_eps": 0.1}),
    "norm before residual": Variant({"norm_before_residual": True}),
    "norm before fc": Variant({"eagle_config": IDS | {"norm_before_fc": True}}, {"input_norm.weight": (96,)}),
    "norm of each state": Variant({"fc_norm": True}, FC_NORMS),
    "normed output": Variant({"norm_output": True}),
    "EAGLE-3.1": Variant({"eagle_config": IDS | {"fc_norm": True, "norm_output": True}}, FC_NORMS),
    "fc bias": Variant({}, {"fc.bias": (32,)}),
    "attention biases": Variant({}, attention_biases()),
    "MLP biases": Variant(
        {}, {f"midlayer.mlp.{part}_proj.bias": (rows,) for part, rows in (("gate", 40), ("up", 40), ("down", 32))}
    ),
    "head norms": Variant({}, {f"midlayer.self_attn.{part}_norm.weight": (8,) for part in "qk"}),
    "logit scale": Variant({"logit_scale": 0.25}),
    "two layers": Variant({"num_hidden_layers": 2}, second_layer("layers.1") | attention_biases("layers.1")),
    "window": Variant({"sliding_window": 5}),
    "two windows": Variant({"sliding_window": 5, "num_hidden_layers": 2}, second_layer("layers.1")),
    "final state": Variant(FINAL_STATE, removed=("fc.weight",)),
    "narrow head": Variant(
        {"hidden_size": 24, "target_hidden_size": 32}, {"fc.weight": (24, 96), "embed_tokens.weight": (61, 24)}
    ),
    "narrow head, final state": Variant(
        {"hidden_size": 24, "target_hidden_size": 32} | FINAL_STATE,
        {"fc.weight": (24, 32), "embed_tokens.weight": (61, 24)},
    ),
    "own embedding": Variant({}, {"embed_tokens.weight": (61, 32)}),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_head_equals_the_published_layer(
    variant: Variant, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches swapped halves, a norm on the wrong input, a residual on the wrong side of its norm, a bias left out."""
    target = tiny_models.target()
    folder = variant.write(tiny_models, target)
    head, published = load(folder, target), PublishedHead(folder, target)
    features, token_ids = random_pairs(seed=0, width=head.config.feature_size)
    positions = torch.arange(NUM_PAIRS)
    with torch.inference_mode():
        states = head.extend(features, token_ids, positions, text_attention())
        logits = head.logits(states)
    expected = published.states(published.fuse(features), token_ids)
    torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(logits, published.logits(expected), rtol=TOLERANCE, atol=10 * TOLERANCE)
    assert logits.shape == (NUM_PAIRS, DRAFT_VOCAB_SIZE)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_recurrent_steps_equal_the_published_layer(
    variant: Variant, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches a drafted state passed through `fc` or a norm again, taken before its norm, or at another position."""
    target = tiny_models.target()
    folder = variant.write(tiny_models, target)
    head, published = load(folder, target), PublishedHead(folder, target)
    features, token_ids = random_pairs(seed=1, width=head.config.feature_size)
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
            torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=2 * TOLERANCE)
            torch.testing.assert_close(
                head.logits(states), published.logits(expected), rtol=TOLERANCE, atol=10 * TOLERANCE
            )


def test_candidates_are_target_tokens(tiny_models: TinyModels) -> None:
    """Catches `d2t` read as ids instead of offsets."""
    target = tiny_models.target()
    folder = tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE)
    tensors = load_file(folder / "model.safetensors")
    assert load(folder, target).candidate_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


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


def test_rope_is_sized_by_the_target(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a head that fails, or drafts nonsense, past its own file's `max_position_embeddings`."""
    target = tiny_models.target(max_position_embeddings=5000)
    head = load(tiny_models.head(target), target)
    with torch.inference_mode():
        states = head.step(torch.ones(1, HIDDEN), torch.tensor([1]), torch.tensor([4999]), text_attention())
    assert bool(states.isfinite().all())


def test_head_of_another_width_needs_its_own_embedding(tiny_models: TinyModels) -> None:
    """Catches the target's embedding fed to a head that cannot hold it."""
    target = tiny_models.target()
    folder = VARIANTS["narrow head"].write(tiny_models, target)
    with pytest.raises(ValueError, match="embed_tokens.weight is missing; a head of 24 .* embedding of 32"):
        load(tiny_models.changed(folder, {}, removed=("embed_tokens.weight",)), target)


def test_fc_of_a_head_that_reads_the_final_state_is_refused(tiny_models: TinyModels) -> None:
    """Catches a projection that other engines skip being applied, or skipped without a word."""
    target = tiny_models.target()
    with pytest.raises(ValueError, match="tensor fc.weight is not used"):
        load(tiny_models.head(target, **FINAL_STATE), target)


def test_tensors_decide_the_number_of_layers(tiny_models: TinyModels, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a config copied from the target, with its number of layers, believed or passed over in silence."""
    target = tiny_models.target()
    head = load(tiny_models.head(target, num_hidden_layers=32), target)
    assert head.cache.num_layers == 1
    assert "says 32, but the head's tensors are of 1" in caplog.text


@pytest.mark.parametrize("naming", ["layers.0", "model.", "model.layers.0", "additional_layers", "bin"])
def test_published_namings_are_one_head(naming: str, tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a prefix or a layer's other name that is not understood."""
    target = tiny_models.target()
    plain = VARIANTS["two layers"].write(tiny_models, target)
    config, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")

    def rename(name: str) -> str:
        if naming == "additional_layers":
            return name.replace("layers.1.", "additional_layers.0.")
        first = "layers.0." if naming.endswith("layers.0") else "midlayer."
        is_prefixed = naming.startswith("model.") and not name.startswith(("lm_head", "d2t", "t2d"))
        return ("model." if is_prefixed else "") + name.replace("midlayer.", first)

    folder = tiny_models.write(config, {rename(name): tensor for name, tensor in tensors.items()})
    if naming == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    features, token_ids = random_pairs(seed=2)
    first, second = (
        load(path, target).extend(features, token_ids, torch.arange(NUM_PAIRS), text_attention())
        for path in (plain, folder)
    )
    assert torch.equal(first, second)


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
        (nested([1, 11, 21]) | {"layer_ids_count_states": True}, (1, 11, 21)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, (25,)),
    ],
)
def test_aux_layer_conventions(fields: dict[str, Any], aux_layers: tuple[int, ...]) -> None:
    """Catches features captured one layer off, which no error shows: the head only stops being accepted."""
    assert Eagle3Config.from_dict(HEAD_CONFIG | fields, TARGET_CONFIG).aux_layers == aux_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_before_fc": True, "eagle_config": {"fc_norm": True}}, "norm_before_fc: and fc_norm are both true"),
        (
            {"norm_output": True, "eagle_config": {"norm_output": False}},
            "norm_output: is True .* False in eagle_config",
        ),
        ({"fc_norm": True, "eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false .* fc_norm"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"model_type": "llama_eagle"}, "model_type: llama_eagle is not known"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"draft_vocab_size": 101}, "draft_vocab_size: 101 exceeds the target's 100"),
        (
            {"sliding_window": 8, "layer_types": [], "use_sliding_window": None, "hidden_act": "relu"},
            "hidden_act: relu",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: gelu .* only silu"),
        ({"hidden_size": 64}, "hidden_size: the head reads states of 64, the target's are 32"),
        ({"target_hidden_size": 64}, "hidden_size: the head reads states of 64, the target's are 32"),
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
        (
            lambda tensors: (tensors.pop("t2d"), tensors["d2t"].zero_()),
            "d2t is zero throughout, which names the first 23 of 61 ids",
        ),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
            r"tensor midlayer\.self_attn\.k_proj\.bias is missing",
        ),
        (
            lambda tensors: tensors.update({"input_norm.weight": torch.zeros(96)}),
            r"tensor input_norm\.weight needs norm_before_fc: true",
        ),
        (
            lambda tensors: tensors.update({"fc_norm.1.weight": torch.zeros(32)}),
            r"tensor fc_norm\.1\.weight needs fc_norm: true",
        ),
        (
            lambda tensors: tensors.update({"mask_hidden": torch.zeros(1, 96)}),
            r"tensor mask_hidden is for parallel drafting",
        ),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.g_proj.weight": torch.zeros(32, 64)}),
            r"tensor midlayer\.self_attn\.g_proj\.weight belongs to a variant of EAGLE-3",
        ),
        (
            lambda tensors: tensors.update({"layers.2.input_layernorm.weight": torch.zeros(32)}),
            r"layers\.1: the head holds layer 2 but not this one",
        ),
        (
            lambda tensors: tensors.update({"embed_tokens.weight": torch.full((61, 32), torch.nan)}),
            r"tensor embed_tokens\.weight holds NaN",
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
        "map of zeros",
        "one attention bias",
        "input norm",
        "norm of a state",
        "mask",
        "gate",
        "layers with a gap",
        "nan in the embedding",
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
