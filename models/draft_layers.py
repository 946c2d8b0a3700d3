"""The decoder layers of EAGLE heads: sizes from a config, and modules from published tensors.

Biases and query-key norms are there when their tensors are: configs of published heads leave them out or get them
wrong.

Letters: T rows, H hidden, D head dim, I MLP width.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.models.attention import Attention
from eyas.models.config import require_fields
from eyas.models.head import HeadCache
from eyas.models.head_files import HeadFiles
from eyas.models.layers import GatedMLP, RMSNorm, SelfAttention
from eyas.models.linear import Linear
from eyas.models.rope import RotaryTable
from eyas.models.tensor_source import TensorSource

_log = logging.getLogger("eyas.models")

_ROPE_FIELDS = ("model_type", "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_theta",
                "rope_scaling", "rope_parameters")  # fmt: skip
# Model types whose own default is full attention although they name a window.
_WINDOW_IF_ASKED = ("qwen2", "qwen3")
_GROUPS = (
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    ("self_attn.o_proj.bias",),
    ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    ("mlp.down_proj.bias",),
)
_REASONS = {
    "mask_hidden": "is for parallel drafting (P-EAGLE), which Eyas does not do",
    "input_norm": "needs norm_before_fc: true in config.json",
    "fc_norm": "needs fc_norm: true in config.json",
    "fc": "is not used by a head that reads one state of its own width (use_aux_hidden_state: false)",
}


@dataclass(frozen=True, slots=True)
class LayerStack:
    """What a head's layers have in common.

    Args:
        windows: of each layer, see `AttentionOptions.window`; their number is the number of layers.
        rope: the fields of the config that decide the rotation.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]
    rope: dict[str, Any]

    @staticmethod
    def from_dict(raw: dict[str, Any], num_layers: int, context_length: int) -> LayerStack:
        """Read a flat config.

        Args:
            num_layers: as the tensors have them; `num_hidden_layers` of published configs is not to be trusted.
            context_length: the target's; a window that never ends within it is none.

        Raises:
            ValueError: naming the field that is missing or not supported.
        """
        require_fields(raw, "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        for name, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
            if raw.get(name) not in (None, only):
                raise ValueError(f"{name}: {raw[name]} is not supported in a draft head; only {only} is")
        if raw["model_type"] not in CONFIG_MAPPING:
            raise ValueError(f"model_type: {raw['model_type']} is not known to transformers; use llama for plain RoPE")
        hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}")
        head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
        return LayerStack(
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            windows=_windows(raw, num_layers, context_length),
            rope={name: raw[name] for name in _ROPE_FIELDS if raw.get(name) is not None} | {"head_dim": head_dim},
        )

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def cache(self) -> HeadCache:
        return HeadCache(self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)

    def rotary_table(self, context_length: int) -> RotaryTable:
        """Sized by the target's context, whatever the head's own file says."""
        return RotaryTable(self.rope, context_length)


def _windows(raw: dict[str, Any], num_layers: int, context_length: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not window or int(window) >= context_length:
        return (None,) * num_layers
    types = raw.get("layer_types")
    if types:
        if len(types) < num_layers:
            raise ValueError(f"layer_types: names {len(types)} layers, the head has {num_layers}")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types[:num_layers])
    asked = raw.get("use_sliding_window")
    applies = raw["model_type"] not in _WINDOW_IF_ASKED if asked is None else bool(asked)
    return (int(window) if applies else None,) * num_layers


def layer_shapes(
    stack: LayerStack, prefix: str, names: Collection[str], input_size: int, norms: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer and their shapes; the optional ones whose group has a member among `names`.

    Args:
        prefix: of the layer, without the dot.
        input_size: columns of the query, key and value projections.
        norms: the layer's norms over H, without `.weight`.
    """
    hidden, inner = stack.hidden_size, stack.intermediate_size
    query, kv = stack.num_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim
    weights = {
        "self_attn.q_proj.weight": (query, input_size),
        "self_attn.k_proj.weight": (kv, input_size),
        "self_attn.v_proj.weight": (kv, input_size),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {**weights, **{f"{norm}.weight": (hidden,) for norm in norms}}
    for group in _GROUPS:
        if any(f"{prefix}.{name}" in names for name in group):
            for name in group:
                is_bias = name.endswith("bias")
                shapes[name] = weights[name.replace("bias", "weight")][:1] if is_bias else (stack.head_dim,)
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


class LayerTensors:
    """Modules of one layer from tensors as `layer_shapes` lists them."""

    def __init__(self, stack: LayerStack, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        self._stack = stack
        self._prefix = prefix
        self._tensors = tensors

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensors[f"{self._prefix}.{name}.weight"], self._stack.rms_norm_eps)

    def _linear(self, *names: str) -> Linear:
        """Several projections of one input as one."""
        weights = [self._tensors[f"{self._prefix}.{name}.weight"] for name in names]
        biases = [self._tensors[f"{self._prefix}.{name}.bias"] for name in names if self._has(f"{name}.bias")]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _has(self, name: str) -> bool:
        return f"{self._prefix}.{name}" in self._tensors

    def attention(self, layer: int) -> SelfAttention:
        stack, window = self._stack, self._stack.windows[layer]
        has_norms = self._has("self_attn.q_norm.weight")
        return SelfAttention(
            layer=layer,
            qkv=self._linear(*(f"self_attn.{part}_proj" for part in "qkv")),
            output=self._linear("self_attn.o_proj"),
            num_heads=stack.num_heads,
            num_kv_heads=stack.num_kv_heads,
            head_dim=stack.head_dim,
            q_norm=self.norm("self_attn.q_norm") if has_norms else None,
            k_norm=self.norm("self_attn.k_norm") if has_norms else None,
            options=PLAIN_ATTENTION if window is None else AttentionOptions(window=window),
        )

    def mlp(self) -> GatedMLP:
        return GatedMLP(gate_up=self._linear("mlp.gate_proj", "mlp.up_proj"), down=self._linear("mlp.down_proj"))


class DraftLayer(nn.Module):
    """An ordinary decoder layer; the first one of an EAGLE-1 head has no norm before its attention."""

    def __init__(self, layer: int, tensors: LayerTensors, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_norm = tensors.norm("input_layernorm") if has_input_norm else None
        self.attention = tensors.attention(layer)
        self.mlp_norm = tensors.norm("post_attention_layernorm")
        self.mlp = tensors.mlp()

    def forward(
        self, residual: Tensor, update: Tensor | None, rotation: tuple[Tensor, Tensor], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """`residual [T, H]` and what is still to be added to it, to the same after the layer."""
        if self.input_norm is not None:
            normed, residual = self.input_norm.add(residual, update)
        else:
            normed = residual  # of the first layer, before which nothing is pending
        normed, residual = self.mlp_norm.add(residual, self.attention(normed, rotation, attention))
        return residual, self.mlp(normed)


def published_layer(prefix: str, attention: SelfAttention, mlp: GatedMLP) -> dict[str, Tensor]:
    """The tensors of a layer under their published names, views of the fused ones; its norms over H are left out."""
    query, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    tensors: dict[str, Tensor] = {
        "self_attn.o_proj.weight": attention.output.weight,
        "mlp.down_proj.weight": mlp.down.weight,
    }
    for kind, fused in (("weight", attention.qkv.weight), ("bias", attention.qkv.bias)):
        if fused is not None:
            parts = zip("qkv", fused.split([query, kv, kv]), strict=True)
            tensors |= {f"self_attn.{part}_proj.{kind}": rows for part, rows in parts}
    for kind, fused in (("weight", mlp.gate_up.weight), ("bias", mlp.gate_up.bias)):
        if fused is not None:
            tensors[f"mlp.gate_proj.{kind}"], tensors[f"mlp.up_proj.{kind}"] = fused.chunk(2)
    for name, bias in (("self_attn.o_proj.bias", attention.output.bias), ("mlp.down_proj.bias", mlp.down.bias)):
        if bias is not None:
            tensors[name] = bias
    if attention.q_norm is not None and attention.k_norm is not None:
        tensors["self_attn.q_norm.weight"] = attention.q_norm.weight
        tensors["self_attn.k_norm.weight"] = attention.k_norm.weight
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def count_layers(names: Collection[str]) -> int:
    """Number of `layers.N` among tensor names, where the first may be called `midlayer`.

    Raises:
        ValueError: naming the first layer that is missing between others.
    """
    found = {int(name.split(".")[1]) for name in names if name.startswith("layers.") and name.split(".")[1].isdigit()}
    if any(name.startswith("midlayer.") for name in names):
        found.add(0)
    for index in range(max(found, default=0)):
        if index not in found:
            raise ValueError(f"layers.{index}: the head holds layer {max(found)} but not this one")
    return max(len(found), 1)


def check_names(source: TensorSource, known: Collection[str], kind: str) -> None:
    """Raise `ValueError`, naming it, for a tensor that the head would leave unused."""
    for name in sorted(set(source.names).difference(known)):
        if not name.endswith("rotary_emb.inv_freq"):  # some exports carry this derived table
            reason = _REASONS.get(name.split(".")[0], f"belongs to a variant of {kind} that its config does not name")
            raise ValueError(f"{source.origin}: tensor {name} {reason}")


def warn_of_layer_count(files: HeadFiles, stack: LayerStack) -> None:
    """Say so where the config's number of layers is not that of the tensors, which decide."""
    stated = files.config.get("num_hidden_layers")
    if stated is not None and int(stated) != stack.num_layers:
        _log.warning(
            "num_hidden_layers: %s says %s, but the head's tensors are of %d; the tensors decide",
            files.path, stated, stack.num_layers,
        )  # fmt: skip
