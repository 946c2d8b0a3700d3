"""The EAGLE-3 draft head (arXiv:2503.01840), in the tensor layout its authors publish.

Draft pair at position i is (target features at i, embedding of token i + 1). `fc` fuses the target's captured states
once; recurrent steps feed back the head's own state, taken before its final norm.

Letters: T rows, H head hidden, Ht target hidden, A captured layers, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.attention import Attention
from eyas.models.checkpoint import TensorSource, read_tensors
from eyas.models.config import DecoderConfig, require_fields
from eyas.models.head import Candidates, DraftHead, HeadCache, Ranker
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.layers import GatedMLP, RMSNorm, SelfAttention
from eyas.models.linear import Linear
from eyas.models.rope import RotaryTable
from eyas.models.target_weights import TargetWeights

_OPTIONAL_TENSORS = ("d2t", "t2d", "embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Normalised head config.

    Args:
        aux_layers: residual-stream indices of the target that `fc` fuses, low to high.
        raw: the file's content, for RoPE.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    raw: dict[str, Any]

    @property
    def capture(self) -> tuple[int, ...]:
        return self.aux_layers

    @property
    def max_depth(self) -> None:
        return None

    @staticmethod
    def normalise(files: HeadFiles, target: DecoderConfig, options: HeadOptions) -> Eagle3Config:
        """See `HeadKind.normalise`."""
        return Eagle3Config.from_dict(files.config, target)

    @staticmethod
    def from_dict(raw: dict[str, Any], target: DecoderConfig) -> Eagle3Config:
        """Normalise a published `config.json` against the target it will draft for.

        Raw EAGLE files count aux layers from either end of a layer: ids that start at 1 name layer outputs, so k means
        the state after k + 1 layers; other ids name the state after k layers.

        Raises:
            ValueError: naming the field, for a variant that is not implemented or a target that does not fit.
        """
        nested = raw.get("eagle_config") or {}
        for option in ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"):
            if raw.get(option) or nested.get(option):
                raise ValueError(f"{option}: true is not supported in an EAGLE-3 head")
        if nested.get("use_aux_hidden_state", True) is False:
            raise ValueError("eagle_config.use_aux_hidden_state: false is not supported in an EAGLE-3 head")
        require_fields(raw, "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        for name, only in (("hidden_act", "silu"), ("num_hidden_layers", 1), ("logit_scale", 1.0)):
            if raw.get(name) not in (None, only):
                raise ValueError(f"{name}: {raw[name]} is not supported in an EAGLE-3 head; only {only} is")
        hidden_size = int(raw["hidden_size"])
        target_hidden = int(raw.get("target_hidden_size") or hidden_size)
        if target_hidden != target.hidden_size:
            raise ValueError(
                f"hidden_size: the head reads states of {target_hidden}, the target's are {target.hidden_size}"
            )
        if hidden_size != target.hidden_size:
            raise ValueError(
                f"hidden_size: {hidden_size} differs from the target's {target.hidden_size}, not supported"
            )
        if int(raw["vocab_size"]) != target.vocab_size:
            raise ValueError(
                f"vocab_size: the head was made for {raw['vocab_size']}, the target has {target.vocab_size}"
            )
        ids = raw.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            aux_layers = target.default_aux_layers()
        else:
            shift = 1 if ids[0] == 1 else 0
            aux_layers = tuple(int(index) + shift for index in ids)
        if not all(0 <= index <= target.num_layers for index in aux_layers):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids: {ids} is outside the target's {target.num_layers} layers"
            )
        num_heads = int(raw["num_attention_heads"])
        return Eagle3Config(
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            draft_vocab_size=int(raw.get("draft_vocab_size") or raw["vocab_size"]),
            aux_layers=aux_layers,
            raw=raw,
        )


class Eagle3Head(DraftHead):
    """The head's one layer. The embedding is the target's own unless the checkpoint has another.

    `extend` runs over committed tokens with true target features, `step` over drafted tokens with the head's states.
    """

    def __init__(self, config: Eagle3Config, tensors: dict[str, Tensor], embedding: Tensor, max_positions: int,
                 trainable: bool = False) -> None:  # fmt: skip
        """Args:
        tensors: as `tensor_shapes` lists them, plus `d2t`, int64 `[Vd]` offsets.
        embedding: for target tokens, `[V, H]`.
        max_positions: the target's context, which sizes RoPE whatever the checkpoint says.
        """
        super().__init__()
        self.config = config
        self.capture = config.capture
        self.dtype, self.device = embedding.dtype, embedding.device
        self.cache = HeadCache(1, config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim)
        eps = config.rms_norm_eps

        def linear(*names: str) -> Linear:
            return Linear(torch.cat([tensors[f"{name}.weight"] for name in names]), trainable=trainable)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors[f"{name}.weight"], eps, trainable=trainable)

        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.fc = linear("fc")
        self.embedding_norm = norm("midlayer.input_layernorm")
        self.state_norm = norm("midlayer.hidden_norm")
        self.attention = SelfAttention(
            layer=0,
            qkv=linear(*(f"midlayer.self_attn.{part}_proj" for part in "qkv")),
            output=linear("midlayer.self_attn.o_proj"),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.mlp_norm = norm("midlayer.post_attention_layernorm")
        self.mlp = GatedMLP(
            gate_up=linear("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"), down=linear("midlayer.mlp.down_proj")
        )
        self.norm = norm("norm")
        self.output = linear("lm_head")
        candidate_ids = torch.arange(config.draft_vocab_size, device=embedding.device) + tensors["d2t"]
        self.register_buffer("candidate_ids", candidate_ids, persistent=False)
        self.rotary = RotaryTable(config.raw, max_positions).to(embedding.device)

    candidate_ids: Tensor  # target id of every draft-vocabulary entry, int64 [Vd]

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Committed pairs: true target features `[T, A * Ht]` and the tokens after them `[T]`, to states `[T, H]`."""
        return self.step(self.fc(features), token_ids, positions, attention)

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """One level: states `[T, H]` of the parents and the drafted tokens `[T]`, to the tokens' states `[T, H]`."""
        embedded = F.embedding(token_ids, self.embedding)
        fused = torch.cat([self.embedding_norm(embedded), self.state_norm(states)], dim=-1)
        rotation = self.rotary.lookup(positions, fused.dtype)
        residual = states + self.attention(fused, rotation, attention)
        updated: Tensor = residual + self.mlp(self.mlp_norm(residual))
        return updated

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        return ranker.rank(self.logits(states), self.candidate_ids)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the draft vocabulary after each state, `[T, Vd]`; column j stands for `candidate_ids[j]`."""
        logits: Tensor = self.output(self.norm(states))
        return logits

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The head in the published layout, with `d2t` and `t2d`; the embedding is left out."""
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = self.attention.qkv.weight.split([query, kv, kv])
        gate, up = self.mlp.gate_up.weight.chunk(2)
        in_draft = torch.zeros(self.embedding.shape[0], dtype=torch.bool)
        in_draft[self.candidate_ids.cpu()] = True
        return {
            "fc.weight": self.fc.weight,
            **{f"midlayer.self_attn.{part}_proj.weight": rows for part, rows in zip("qkv", qkv, strict=True)},
            "midlayer.self_attn.o_proj.weight": self.attention.output.weight,
            "midlayer.input_layernorm.weight": self.embedding_norm.weight,
            "midlayer.hidden_norm.weight": self.state_norm.weight,
            "midlayer.post_attention_layernorm.weight": self.mlp_norm.weight,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": self.mlp.down.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.output.weight,
            "d2t": self.candidate_ids.cpu() - torch.arange(config.draft_vocab_size),
            "t2d": in_draft,
        }


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every trained tensor of the published layout and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "fc.weight": (hidden, len(config.aux_layers) * hidden),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }


def load_eagle3(
    files: HeadFiles, target: TargetWeights, options: HeadOptions, dtype: torch.dtype, device: torch.device
) -> Eagle3Head:
    """See `HeadKind.load`."""
    config, source = Eagle3Config.normalise(files, target.config, options), files.tensors
    for name in sorted(set(source.names).difference(tensor_shapes(config), _OPTIONAL_TENSORS)):
        if not name.endswith("rotary_emb.inv_freq"):  # some exports carry this derived table
            raise ValueError(f"{source.origin}: tensor {name} belongs to a variant of EAGLE-3 that is not supported")
    tensors = read_tensors(source, tensor_shapes(config), dtype)
    tensors["d2t"] = _vocabulary_map(source, config, target.config)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    if "embed_tokens.weight" in source.names:
        embedding_shape = (target.config.vocab_size, target.config.hidden_size)
        embedding = source.read("embed_tokens.weight", embedding_shape, dtype)
    else:
        embedding = target.embedding(dtype)
    return Eagle3Head(config, tensors, embedding.to(device), target.config.max_positions)


def _vocabulary_map(source: TensorSource, config: Eagle3Config, target: DecoderConfig) -> Tensor:
    """Offsets from draft to target ids, checked: strictly increasing, within the vocabulary, agreeing with `t2d`."""
    size, folder = config.draft_vocab_size, source.origin
    if "d2t" not in source.names:
        if size != target.vocab_size:
            raise ValueError(
                f"{folder}: tensor d2t is missing, but draft_vocab_size is {size}, not {target.vocab_size}"
            )
        return torch.zeros(size, dtype=torch.int64)
    offsets = source.read("d2t", (size,), torch.int64)
    ids = torch.arange(size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or bool((ids.diff() <= 0).any()):
        raise ValueError(f"{folder}: d2t must map to strictly increasing ids below {target.vocab_size}")
    has_mask = "t2d" in source.names
    in_draft = source.read("t2d", (target.vocab_size,), torch.bool) if has_mask else None
    if size == target.vocab_size and in_draft is not None and not bool(in_draft.any()):
        in_draft = None  # heads over the whole vocabulary are published with both maps zero
    if in_draft is not None and not torch.equal(in_draft.nonzero().squeeze(1), ids):
        raise ValueError(f"{folder}: t2d and d2t name different tokens")
    return offsets
