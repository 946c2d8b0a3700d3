from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.models.attention import Attention
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig
from eyas.models.head import HeadCache
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.head_loading import load_head
from eyas.models.llama import load_decoder
from eyas.models.mtp import MtpHead, load_mtp
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]

TOLERANCE = 1e-4  # float32, other order of summation than the transcription below
HIDDEN, VOCAB_SIZE, NUM_PAIRS = 32, 61, 40
CPU = torch.device("cpu")

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 2,
}
GLM = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 2,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
QWEN_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "max_position_embeddings": 256,
}
QWEN_3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
SPECULATORS_LAYER = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Family:
    """How one family publishes its module.

    Args:
        architecture, options: of the target.
        block: `config.json` of a module beside its target; None if it lies in the target's own folder.
        layer: folder and class prefix of its decoder layer in `transformers`.
        rotary: the rest of the name of its rotary embedding.
        prefix: of the layer's tensors; that of the others goes before each of `names`.
        names: of the embedding's norm, the hidden state's norm, the projection and the final norm.
    """

    architecture: str
    layer: tuple[str, str]
    prefix: str
    names: tuple[str, str, str, str]
    rotary: str = "RotaryEmbedding"
    options: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] | None = None
    layer_options: dict[str, Any] = field(default_factory=dict)
    shared_copies: tuple[str, str] | None = None
    hidden_first: bool = False
    masks_first: bool = False
    is_zero_centred: bool = False


DEEPSEEK_NAMES = {
    "prefix": "model.layers.4.",
    "names": tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "shared_copies": ("model.layers.4.embed_tokens", "model.layers.4.shared_head.head"),
    "masks_first": True,
}
QWEN_NAMES = {
    "prefix": "mtp.layers.0.",
    "names": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
}
LAYERNORMS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
SPECULATORS_NAMES = {
    "prefix": "mtp_layers.0.",
    "names": tuple(f"mtp_layers.0.{name}" for name in LAYERNORMS),
}
MIMO_NAMES = {
    "prefix": "model.mtp_layers.0.",
    "names": tuple(f"model.mtp_layers.0.{name}" for name in LAYERNORMS),
    "hidden_first": True,
    "masks_first": True,
}
DEEPSEEK = Family(
    "DeepseekV3ForCausalLM",
    ("deepseek_v3", "DeepseekV3"),
    options=MLA,
    layer_options={"first_k_dense_replace": 0},
    **DEEPSEEK_NAMES,
)
QWEN3_NEXT = Family(
    "Qwen3ForCausalLM",
    ("qwen3_next", "Qwen3Next"),
    block=QWEN_NEXT,
    layer_options={"layer_types": ["full_attention"], "num_hidden_layers": 1},
    is_zero_centred=True,
    **QWEN_NAMES,
)
FAMILIES = {
    "deepseek": DEEPSEEK,
    "deepseek dense": replace(
        DEEPSEEK, options=MLA | {"first_k_dense_replace": 9, "q_lora_rank": None}, layer_options={}
    ),
    "deepseek yarn": replace(DEEPSEEK, options=MLA | {"rope_parameters": YARN}),
    "glm": replace(DEEPSEEK, architecture="Glm4MoeForCausalLM", layer=("glm4_moe", "Glm4Moe"), options=GLM),
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next dense": replace(QWEN3_NEXT, layer_options=QWEN3_NEXT.layer_options | {"mlp_only_layers": [0]}),
    "qwen3.5": replace(QWEN3_NEXT, layer=("qwen3_5", "Qwen3_5"), rotary="TextRotaryEmbedding", block=QWEN_3_5),
    "qwen3.5 moe": replace(
        QWEN3_NEXT,
        layer=("qwen3_5_moe", "Qwen3_5Moe"),
        rotary="TextRotaryEmbedding",
        block=QWEN_3_5 | QWEN_NEXT | {"model_type": "qwen3_5_moe_text", "head_dim": 16},
    ),
    "mimo": Family("Qwen2ForCausalLM", ("qwen2", "Qwen2"), **MIMO_NAMES),
    "speculators": Family("Qwen3ForCausalLM", ("qwen3", "Qwen3"), block=SPECULATORS_LAYER, **SPECULATORS_NAMES),
}


@dataclass(frozen=True)
class Published:
    """A module as its authors describe it: the whole text at once, the layer's own eager attention, no cache."""

    family: Family
    target: Path
    folder: Path
    layer: Any
    rotary: Any
    tensors: dict[str, Tensor]
    eps: float

    @staticmethod
    def write(family: Family, tiny_models: TinyModels) -> Published:
        target = tiny_models.target(family.architecture, **family.options)
        of_target = json.loads((target / "config.json").read_text())
        raw = of_target if family.block is None else family.block
        module, prefix = family.layer
        code = import_module(f"transformers.models.{module}.modeling_{module}")
        config = AutoConfig.for_model(**raw | family.layer_options)
        config._attn_implementation = "eager"
        layer = getattr(code, f"{prefix}DecoderLayer")(config, 0).eval()
        generator = torch.Generator().manual_seed(3)
        for name, tensor in layer.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            centre = float("norm" in name and not family.is_zero_centred)
            scale = 0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_(centre + scale * noise)
        tensors = {family.prefix + name: tensor for name, tensor in unfused(layer.state_dict()).items()}
        shapes = [(HIDDEN,), (HIDDEN,), (HIDDEN, 2 * HIDDEN), (HIDDEN,)]
        for name, shape in zip(family.names, shapes, strict=True):
            noise = torch.randn(shape, generator=generator)
            tensors[f"{name}.weight"] = (
                noise / HIDDEN**0.5 if len(shape) == 2 else 0.3 * noise + (not family.is_zero_centred)
            )
        for name in family.shared_copies or ():
            tensors[f"{name}.weight"] = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
        if family.block is None:
            folder = target
            save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
        else:
            folder = tiny_models.write(family.block, tensors)
        rotary = getattr(code, prefix + family.rotary)(config)
        return Published(family, target, folder, layer, rotary, tensors, config.rms_norm_eps)

    def load(self, options: HeadOptions | None = None) -> MtpHead:
        weights = TargetWeights(self.target, DecoderConfig.from_folder(self.target))
        if self.family is FAMILIES["speculators"]:  # its folder is another module's business, its names are not
            files = HeadFiles("mtp", "speculators mtp folder", self.folder, SPECULATORS_LAYER, Checkpoint(self.folder))
            return load_mtp(files, weights, options or HeadOptions(), torch.float32, CPU).eval()
        head = load_head(self.folder, weights, torch.float32, CPU, options)
        assert isinstance(head, MtpHead)
        return head

    def unnormed(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """What the layer leaves of pairs 0 … T - 1: target features or earlier states, and the tokens after them."""
        embedded = self.shared("model.embed_tokens.weight", 0)[token_ids]
        if self.family.masks_first:
            embedded[0] = 0
        embedded, hidden = self.norm(0, embedded), self.norm(1, hidden)
        fused = torch.cat([hidden, embedded] if self.family.hidden_first else [embedded, hidden], dim=-1)
        x = (fused @ self.tensors[f"{self.family.names[2]}.weight"].T)[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        with torch.inference_mode():
            rotation = self.rotary(x, positions)
            return self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)[0]

    def states(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        return self.norm(3, self.unnormed(hidden, token_ids))

    def logits(self, normed: Tensor) -> Tensor:
        return normed @ self.shared("lm_head.weight", 1).T

    def norm(self, index: int, x: Tensor) -> Tensor:
        weight = self.tensors[f"{self.family.names[index]}.weight"] + self.family.is_zero_centred
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight

    def shared(self, name: str, copy: int) -> Tensor:
        if self.family.shared_copies is not None:
            return self.tensors[f"{self.family.shared_copies[copy]}.weight"]
        return load_file(self.target / "model.safetensors")[name]


def unfused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's tensors with every expert by itself, as checkpoints hold them."""
    published = {}
    for name, tensor in state.items():
        if name == "mlp.experts.gate_up_proj":
            for expert, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                published[f"mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                published[f"mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif name == "mlp.experts.down_proj":
            published |= {f"mlp.experts.{expert}.down_proj.weight": rows.clone() for expert, rows in enumerate(tensor)}
        else:
            published[name] = tensor.clone()
    return published


def scaled(attention: Attention) -> Attention:
    """An attention that is told its scale, from one that always divides by the root of D."""

    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        return attention(layer, query * scale * query.shape[-1] ** 0.5, key, value)

    return attend


def random_pairs(seed: int) -> tuple[Tensor, Tensor]:
    """Target features `[T, H]` and the tokens after them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_PAIRS, HIDDEN, generator=generator), torch.randint(
        VOCAB_SIZE, (NUM_PAIRS,), generator=generator
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_module_equals_the_published_one(name: str, tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches swapped halves, norms swapped or not centred, position 0 unmasked, experts mixed up, a lost gate."""
    published = Published.write(FAMILIES[name], tiny_models)
    head = published.load()
    features, token_ids = random_pairs(seed=0)
    attention, split = scaled(text_attention()), 13
    with torch.inference_mode():
        states = torch.cat([
            head.extend(features[rows], token_ids[rows], torch.arange(NUM_PAIRS)[rows], attention)
            for rows in (slice(split), slice(split, None))
        ])  # fmt: skip
        logits = head.logits(states)
    expected = published.states(features, token_ids)
    torch.testing.assert_close(states, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits, published.logits(expected), rtol=0, atol=TOLERANCE)
    assert logits.shape == (NUM_PAIRS, VOCAB_SIZE)


@pytest.mark.parametrize("name", FAMILIES)
def test_recurrent_steps_equal_the_published_module(
    name: str, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches a state fed back before the final norm where it belongs after it, or at another position."""
    published = Published.write(FAMILIES[name], tiny_models)
    head = published.load()
    hidden, token_ids = random_pairs(seed=1)
    attention = scaled(text_attention())
    with torch.inference_mode():
        states = head.extend(hidden, token_ids, torch.arange(NUM_PAIRS), attention)[-1:]
        for step in range(4):
            drafted = torch.tensor([7 * step])
            states = head.step(states, drafted, torch.tensor([NUM_PAIRS + step]), attention)
            hidden = torch.cat([hidden, published.states(hidden, token_ids)[-1:]])
            token_ids = torch.cat([token_ids, drafted])
            torch.testing.assert_close(states, published.states(hidden, token_ids)[-1:], rtol=0, atol=TOLERANCE)


def test_states_before_the_norm(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches logits of unnormed states where the feedback is chosen to be taken before the norm."""
    published = Published.write(FAMILIES["deepseek"], tiny_models)
    head = published.load()
    object.__setattr__(head.config, "feeds_back_norm", False)
    features, token_ids = random_pairs(seed=2)
    with torch.inference_mode():
        states = head.extend(features, token_ids, torch.arange(NUM_PAIRS), scaled(text_attention()))
        logits = head.logits(states)
    expected = published.unnormed(features, token_ids)
    torch.testing.assert_close(states, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits, published.logits(published.norm(3, expected)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("deepseek", HeadCache(1, 4, 4, 12, 6)),
        ("glm", HeadCache(1, 4, 2, 8, 8)),
        ("qwen3-next", HeadCache(1, 4, 2, 12, 12)),
        ("mimo", HeadCache(1, 4, 2, 8, 8)),
    ],
)
def test_cache_fits_what_the_layer_attends_over(
    name: str, cache: HeadCache, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches a pool made for compressed MLA keys, or for values as wide as the keys."""
    head = Published.write(FAMILIES[name], tiny_models).load()
    attention, shapes = scaled(text_attention()), []

    def note_shapes(layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        shapes.append(HeadCache(layer + 1, query.shape[1], key.shape[1], key.shape[2], value.shape[2]))
        assert key.shape[1] == value.shape[1]
        return attention(layer, query, key, value, options)

    features, token_ids = random_pairs(seed=0)
    with torch.inference_mode():
        head.extend(features, token_ids, torch.arange(NUM_PAIRS), note_shapes)
    assert shapes == [cache] == [head.cache]


def test_reads_the_state_after_the_final_norm(tiny_models: TinyModels) -> None:
    """Catches a module fed with the residual stream, which it was not trained on, unless the user asks for it."""
    published = Published.write(FAMILIES["mimo"], tiny_models)
    assert published.load().capture == (5,)
    assert published.load().config.plausible_captures == ((5,), (4,))
    assert published.load(HeadOptions(aux_layers=(4,))).capture == (4,)
    for layers in ((4, 5), (6,), ()):
        with pytest.raises(ValueError, match=r"aux_layers: an MTP module reads one state of the target, 0 to 5"):
            published.load(HeadOptions(aux_layers=layers))


def test_target_ignores_the_module(tiny_models: TinyModels) -> None:
    """Catches a target that refuses or reads the tensors of the module in its own folder."""
    folder = Published.write(FAMILIES["mimo"], tiny_models).folder
    plain = tiny_models.target("Qwen2ForCausalLM")
    of_folder, of_plain = (load_decoder(each, torch.float32, CPU).state_dict() for each in (folder, plain))
    assert of_folder.keys() == of_plain.keys()
    assert all(torch.equal(tensor, of_plain[name]) for name, tensor in of_folder.items())


def test_experts_may_be_published_fused(tiny_models: TinyModels) -> None:
    """Catches fused experts being refused, as newer checkpoints hold them, or put together in another order."""
    published = Published.write(FAMILIES["qwen3-next"], tiny_models)
    expected = published.load().block.state_dict()
    tensors = {
        name: tensor for name, tensor in published.tensors.items() if not name.startswith("mtp.layers.0.mlp.experts.")
    }
    state = published.layer.state_dict()
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        tensors[f"mtp.layers.0.{name}"] = state[name]
    save_file(tensors, published.folder / "model.safetensors")
    loaded = published.load().block.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_router_stays_in_float32(tiny_models: TinyModels) -> None:
    """Catches expert scores computed in bfloat16, where near ties send tokens to other experts."""
    published = Published.write(FAMILIES["deepseek"], tiny_models)
    weights = TargetWeights(published.target, DecoderConfig.from_folder(published.target))
    head = load_head(published.folder, weights, torch.bfloat16, CPU)
    dtypes = {name: tensor.dtype for name, tensor in head.state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        "block.layer.mlp.gate.weight",
        "block.layer.mlp.gate.e_score_correction_bias",
    }
    assert head.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("eh_proj"), r"tensor model\.layers\.4\.eh_proj\.weight is missing"),
        (lambda tensors: tensors.pop("self_attn.o_proj"), r"tensor .*4\.self_attn\.o_proj\.weight is missing"),
        (lambda tensors: tensors.pop("mlp.experts.2.up_proj"), r"mlp\.experts\.2\.up_proj\.weight is missing"),
        (
            lambda tensors: tensors.update({"eh_proj": torch.zeros(HIDDEN, HIDDEN)}),
            r"eh_proj\.weight is \[32, 32\], expected \[32, 64\]",
        ),
        (
            lambda tensors: tensors.update({"mlp.experts.1.down_proj": torch.zeros(20, 32)}),
            r"mlp\.experts\.1\.down_proj\.weight is \[20, 32\], expected \[32, 20\]",
        ),
        (
            lambda tensors: tensors.update({"shared_head.head": torch.zeros(60, HIDDEN)}),
            r"shared_head\.head\.weight is \[60, 32\], expected \[61, 32\]",
        ),
        (
            lambda tensors: tensors["hnorm"].__setitem__(3, torch.nan),
            r"tensor model\.layers\.4\.hnorm\.weight holds NaN",
        ),
        (
            lambda tensors: tensors["self_attn.kv_b_proj"].__setitem__((0, 0), torch.inf),
            r"model\..*\.kv_b_proj\.weight holds NaN",
        ),
        (
            lambda tensors: tensors.update({"self_attn.indexer": torch.zeros(4)}),
            r"tensor model\.layers\.4\.self_attn\.indexer\.weight belongs to a variant of MTP",
        ),
        (
            lambda tensors: tensors.update({"mlp.experts.4.up_proj": torch.zeros(20, 32)}),
            r"tensor model\.layers\.4\.mlp\.experts\.4\.up_proj\.weight belongs to a variant of MTP",
        ),
    ],
    ids=[
        "no projection",
        "no output projection",
        "an expert short",
        "projection of one input",
        "expert transposed",
        "head of another vocabulary",
        "nan",
        "infinity",
        "unknown attention part",
        "an expert more",
    ],
)
def test_bad_tensors_are_named(
    change: Callable[[dict[str, Tensor]], Any], message: str, tiny_models: TinyModels
) -> None:
    """Catches a damaged or unknown module that would load and draft tokens nobody accepts."""
    published = Published.write(FAMILIES["deepseek"], tiny_models)
    prefix = "model.layers.4."
    everything = load_file(published.folder / "model.safetensors")
    own = {
        name.removeprefix(prefix).removesuffix(".weight"): everything.pop(name)
        for name in list(everything)
        if name.startswith(prefix)
    }
    bias = own.pop("mlp.gate.e_score_correction_bias")
    change(own)
    everything |= {f"{prefix}{name}.weight": tensor for name, tensor in own.items()}
    everything[f"{prefix}mlp.gate.e_score_correction_bias"] = bias
    save_file(everything, published.folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        published.load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 64}, "hidden_size: the MTP module has 64, the target 32"),
        ({"vocab_size": 60}, "vocab_size: the MTP module has 60, the target 61"),
        ({"model_type": "deepseek_v32"}, "model_type: the layer of deepseek_v32 is not .* glm4_moe"),
        ({"model_type": None}, "model_type: the layer of None is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type: dynamic changes"),
        ({"num_attention_heads": "many"}, "config of the MTP module's layer: .*num_attention_heads"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str, tiny_models: TinyModels) -> None:
    """Catches a module made for another model, and a layer that would run and mean nothing."""
    published = Published.write(FAMILIES["qwen3-next"], tiny_models)
    (published.folder / "config.json").write_text(json.dumps(QWEN_NEXT | fields))
    with pytest.raises(ValueError, match=message):
        published.load()
