"""The EAGLE draft head of the first two papers (arXiv:2401.15077, arXiv:2406.16858), and its HASS and TTT variants.

Draft pair at position i is (feature at i, embedding of token i + 1): `fc` joins the two, decoder layers follow, and the
target's own output projection scores their result. The feature of a real token is the target's state after its final
norm; that of a drafted one is the head's result. Letters: T rows, H hidden, V target vocabulary, Vd scored vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.attention import Attention
from eyas.models.candidate_projection import (
    CANDIDATE_TENSORS,
    CandidateProjection,
    RowLinear,
    read_candidate_projection,
)
from eyas.models.config import DecoderConfig
from eyas.models.draft_layers import (
    DraftLayer,
    LayerStack,
    LayerTensors,
    check_names,
    count_layers,
    layer_shapes,
    published_layer,
    warn_of_layer_count,
)
from eyas.models.head import Candidates, DraftHead, Ranker
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.layers import RMSNorm, summed
from eyas.models.linear import Linear
from eyas.models.target_weights import TargetWeights
from eyas.models.tensor_source import read_tensors
from eyas.models.vocabulary_map import read_token_map

EMBEDDING_NORM, FEATURE_NORM, OUTPUT_NORM = "embedding_layernorm", "hidden_states_layernorm", "norm"
_NORMS = (EMBEDDING_NORM, FEATURE_NORM, OUTPUT_NORM)
_SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Normalised head config.

    Args:
        norms: those of `embedding_layernorm`, `hidden_states_layernorm` (HASS's `add_para_norm`: before `fc`) and
            `norm` (on the result) that the head has.
        has_first_norm: the first layer norms its input, which the original does not.
        final_index: the target state it reads.
        logit_scale: multiplies the logits.
        raw: the file's content.
    """

    layers: LayerStack
    norms: tuple[str, ...]
    has_first_norm: bool
    final_index: int
    logit_scale: float
    raw: dict[str, Any]

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def capture(self) -> tuple[int, ...]:
        return (self.final_index,)

    @property
    def plausible_captures(self) -> tuple[tuple[int, ...], ...]:
        return (self.capture,)

    @property
    def max_depth(self) -> None:
        return None

    @staticmethod
    def normalise(files: HeadFiles, target: DecoderConfig, options: HeadOptions) -> EagleConfig:
        """See `HeadKind.normalise`."""
        if options.aux_layers not in (None, (target.final_index,)):
            raise ValueError("aux_layers: an EAGLE-1 head reads the target's final state alone; leave the option out")
        return EagleConfig.from_dict(files.config, target, files.tensors.names)

    @staticmethod
    def from_dict(raw: dict[str, Any], target: DecoderConfig, names: Collection[str] = ()) -> EagleConfig:
        """Normalise a flat `config.json` against the target it will draft for.

        Args:
            names: the head's tensors, which decide what the config leaves out or gets wrong.

        Raises:
            ValueError: naming the field, for a variant that is not implemented or a target that does not fit.
        """
        layers = LayerStack.from_dict(raw, count_layers(names), target.max_positions)
        for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if int(raw[name]) != expected:
                raise ValueError(f"{name}: the head was made for {raw[name]}, the target has {expected}")
        norms = tuple(name for name in _NORMS if f"{name}.weight" in names)
        if raw.get("add_para_norm") and not {EMBEDDING_NORM, FEATURE_NORM} <= set(norms):
            raise ValueError(
                f"add_para_norm: is true, but the head's files hold no {EMBEDDING_NORM} and {FEATURE_NORM} weights"
            )
        return EagleConfig(
            layers=layers,
            norms=norms,
            has_first_norm="layers.0.input_layernorm.weight" in names,
            final_index=target.final_index,
            logit_scale=float(1.0 if raw.get("logit_scale") is None else raw["logit_scale"]),
            raw=raw,
        )


class EagleHead(DraftHead):
    """The head. `extend` and `step` are one computation: only where the features come from differs."""

    def __init__(self, config: EagleConfig, tensors: dict[str, Tensor], embedding: Tensor, output: Tensor,
                 candidate_ids: Tensor, max_positions: int,
                 projection: CandidateProjection | None = None) -> None:  # fmt: skip
        """Args:
        tensors: as `tensor_shapes` lists them.
        embedding: for target tokens, `[V, H]`.
        output: rows of the output projection it scores, `[Vd, H]`.
        candidate_ids: target id of each row, int64 `[Vd]`.
        max_positions: the target's context, which sizes RoPE whatever the checkpoint says.
        """
        super().__init__()
        self.config = config
        self.capture = config.capture
        self.dtype, self.device = embedding.dtype, embedding.device
        self.cache = config.layers.cache
        self.state_size = config.hidden_size

        def norm(name: str) -> RMSNorm | None:
            if name not in config.norms:
                return None
            return RMSNorm(tensors[f"{name}.weight"], config.layers.rms_norm_eps)

        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.embedding_norm, self.feature_norm = norm(EMBEDDING_NORM), norm(FEATURE_NORM)
        self.fc = Linear(tensors["fc.weight"], tensors.get("fc.bias"))
        self.layers = nn.ModuleList(
            DraftLayer(
                index,
                LayerTensors(config.layers, f"layers.{index}", tensors),
                has_input_norm=index > 0 or config.has_first_norm,
            )
            for index in range(config.layers.num_layers)
        )
        self.norm = norm(OUTPUT_NORM)
        self.output = Linear(output) if projection is None else RowLinear(output)
        self.projection = projection
        self.register_buffer("candidate_ids", candidate_ids, persistent=False)
        self.rotary = config.layers.rotary_table(max_positions).to(embedding.device)

    candidate_ids: Tensor  # target id of every scored row, int64 [Vd]

    @property
    def max_candidates(self) -> int:
        return self.candidate_ids.numel() if self.projection is None else self.projection.num_candidates

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Committed pairs: final target states `[T, H]` and the tokens after them `[T]`, to states `[T, H]`."""
        return self.step(features, token_ids, positions, attention)

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """One level: features `[T, H]` of the parents and the drafted tokens `[T]`, to the tokens' states `[T, H]`."""
        embedded = F.embedding(token_ids, self.embedding)
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        if self.feature_norm is not None:
            states = self.feature_norm(states)
        residual: Tensor = self.fc(torch.cat([embedded, states], dim=-1))
        update: Tensor | None = None
        rotation = self.rotary.lookup(positions, residual.dtype)
        for layer in self.layers:
            residual, update = layer(residual, update, rotation, attention)
        return summed(residual, update) if self.norm is None else self.norm.add(residual, update)[0]

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        if self.projection is None:
            return ranker.rank(self.logits(states), self.candidate_ids)
        return self.projection.rank(states, self.output, self.candidate_ids, self.config.logit_scale, ranker)

    def logits(self, states: Tensor) -> Tensor:
        """Scores after each state, `[T, Vd]`; column j stands for `candidate_ids[j]`."""
        logits: Tensor = self.output(states)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def scored(self, states: Tensor) -> Tensor:
        """What the output projection reads, `[T, H]`: the states as they are."""
        return states

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The head in its authors' layout; what it shares with the target is left out."""
        tensors: dict[str, Tensor] = {"fc.weight": self.fc.weight}
        if self.fc.bias is not None:
            tensors["fc.bias"] = self.fc.bias
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            tensors |= published_layer(f"layers.{index}", layer.attention, layer.mlp)
            tensors[f"layers.{index}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
            if layer.input_norm is not None:
                tensors[f"layers.{index}.input_layernorm.weight"] = layer.input_norm.weight
        for name, norm in zip(_NORMS, (self.embedding_norm, self.feature_norm, self.norm), strict=True):
            if norm is not None:
                tensors[f"{name}.weight"] = norm.weight
        if self.projection is not None:
            tensors |= self.projection.checkpoint_tensors()
        return tensors


def tensor_shapes(config: EagleConfig, names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every trained tensor and its shape, with the optional biases and norms among `names`."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if "fc.bias" in names:
        shapes["fc.bias"] = (hidden,)
    for index in range(config.layers.num_layers):
        norms = ["post_attention_layernorm"]
        if index > 0 or config.has_first_norm:
            norms.append("input_layernorm")
        shapes |= layer_shapes(config.layers, f"layers.{index}", names, hidden, tuple(norms))
    return shapes | {f"{name}.weight": (hidden,) for name in config.norms}


def load_eagle(
    files: HeadFiles, target: TargetWeights, options: HeadOptions, dtype: torch.dtype, device: torch.device
) -> EagleHead:
    """See `HeadKind.load`."""
    config, source = EagleConfig.normalise(files, target.config, options), files.tensors
    shapes = tensor_shapes(config, source.names)
    check_names(source, {*shapes, *_SHARED, *CANDIDATE_TENSORS}, "EAGLE")
    warn_of_layer_count(files, config.layers)
    vocab_size, hidden = target.config.vocab_size, config.hidden_size
    own = {name: (vocab_size, hidden) for name in _SHARED if name in source.names}
    tensors = {name: tensor.to(device) for name, tensor in read_tensors(source, shapes | own, dtype).items()}
    embedding = tensors["embed_tokens.weight"] if "embed_tokens.weight" in own else target.embedding(dtype)
    output = tensors["lm_head.weight"] if "lm_head.weight" in own else target.output(dtype)
    if options.token_map is None:
        token_ids = torch.arange(vocab_size)
    else:
        token_ids = read_token_map(Path(options.token_map), vocab_size)
        output = output[token_ids.to(output.device)]
    projection = read_candidate_projection(source, config.raw, options, token_ids, (vocab_size, hidden), dtype)
    return EagleHead(
        config,
        tensors,
        embedding.to(device),
        output.to(device),
        token_ids.to(device),
        target.config.max_positions,
        projection=None if projection is None else projection.to(device),
    )
