"""The EAGLE-3 draft head (arXiv:2503.01840) and its published variants, in the tensor names its authors use.

Draft pair at position i is (target features at i, embedding of token i + 1). `fc` fuses the target's captured states
once; recurrent steps feed back the head's own state, taken before its final norm, or after it with `norm_output`
(EAGLE-3.1).

Letters: T rows, H head hidden, Ht target hidden, A captured layers, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

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
from eyas.models.draft_layers import (
    DraftLayer,
    LayerTensors,
    check_names,
    layer_shapes,
    published_layer,
    warn_of_layer_count,
)
from eyas.models.eagle3_config import Eagle3Config
from eyas.models.head import Candidates, DraftHead, Ranker
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.layers import RMSNorm, summed
from eyas.models.linear import Linear
from eyas.models.target_weights import TargetWeights
from eyas.models.tensor_source import read_tensors
from eyas.models.vocabulary_map import read_vocabulary_map

_OPTIONAL_TENSORS = ("d2t", "t2d", "embed_tokens.weight", *CANDIDATE_TENSORS)
_FIRST_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


class Eagle3Head(DraftHead):
    """The head. The embedding is the target's own unless the checkpoint has another.

    `extend` runs over committed tokens with true target features, `step` over drafted tokens with the head's states.
    """

    def __init__(self, config: Eagle3Config, tensors: dict[str, Tensor], embedding: Tensor, max_positions: int,
                 projection: CandidateProjection | None = None) -> None:  # fmt: skip
        """Args:
        tensors: as `tensor_shapes` lists them, plus `d2t`, int64 `[Vd]` offsets.
        embedding: for target tokens, `[V, H]`.
        max_positions: the target's context, which sizes RoPE whatever the checkpoint says.
        """
        super().__init__()
        self.config = config
        self.capture = config.capture
        self.dtype, self.device = embedding.dtype, embedding.device
        self.cache = config.layers.cache
        self.state_size = config.hidden_size
        eps = config.layers.rms_norm_eps

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors[f"{name}.weight"], eps)

        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.input_norm = norm("input_norm") if config.norm_before_fc else None
        num_norms = len(config.aux_layers) if config.fc_norm else 0
        self.fc_norms = nn.ModuleList(norm(f"fc_norm.{index}") for index in range(num_norms))
        self.fc = Linear(tensors["fc.weight"], tensors.get("fc.bias")) if config.has_fc else nn.Identity()
        first = LayerTensors(config.layers, "midlayer", tensors)
        self.embedding_norm = first.norm("input_layernorm")
        self.state_norm = first.norm("hidden_norm")
        self.attention = first.attention(0)
        self.mlp_norm = first.norm("post_attention_layernorm")
        self.mlp = first.mlp()
        self.layers = nn.ModuleList(
            DraftLayer(index, LayerTensors(config.layers, f"layers.{index}", tensors))
            for index in range(1, config.layers.num_layers)
        )
        self.norm = norm("norm")
        output_class = Linear if projection is None else RowLinear
        self.output = output_class(tensors["lm_head.weight"])
        self.projection = projection
        candidate_ids = torch.arange(config.draft_vocab_size, device=embedding.device) + tensors["d2t"]
        self.register_buffer("candidate_ids", candidate_ids, persistent=False)
        self.rotary = config.layers.rotary_table(max_positions).to(embedding.device)

    candidate_ids: Tensor  # target id of every draft-vocabulary entry, int64 [Vd]

    @property
    def max_candidates(self) -> int:
        return self.candidate_ids.numel() if self.projection is None else self.projection.num_candidates

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Committed pairs: true target features `[T, A * Ht]` and the tokens after them `[T]`, to states `[T, H]`."""
        return self.step(self.fuse(features), token_ids, positions, attention)

    def fuse(self, features: Tensor) -> Tensor:
        """True target features `[T, A * Ht]` to the width of a state, `[T, H]`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        elif self.config.fc_norm:
            parts = features.chunk(len(self.fc_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """One level: states `[T, H]` of the parents and the drafted tokens `[T]`, to the tokens' states `[T, H]`."""
        embedded, normed = F.embedding(token_ids, self.embedding), self.state_norm(states)
        fused = torch.cat([self.embedding_norm(embedded), normed], dim=-1)
        rotation = self.rotary.lookup(positions, fused.dtype)
        residual = normed if self.config.norm_before_residual else states
        normed, residual = self.mlp_norm.add(residual, self.attention(fused, rotation, attention))
        update = self.mlp(normed)
        for layer in self.layers:
            residual, update = layer(residual, update, rotation, attention)
        return self.norm.add(residual, update)[0] if self.config.norm_output else summed(residual, update)

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        if self.projection is None:
            return ranker.rank(self.logits(states), self.candidate_ids)
        scored = self.scored(states)
        return self.projection.rank(scored, self.output, self.candidate_ids, self.config.logit_scale, ranker)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the draft vocabulary after each state, `[T, Vd]`; column j stands for `candidate_ids[j]`."""
        logits: Tensor = self.output(self.scored(states))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def scored(self, states: Tensor) -> Tensor:
        """What the output projection reads, `[T, H]`; states of a `norm_output` head are normed already."""
        scored: Tensor = states if self.config.norm_output else self.norm(states)
        return scored

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The head in the published layout, with `d2t` and `t2d`; the embedding is left out."""
        in_draft = torch.zeros(self.embedding.shape[0], dtype=torch.bool)
        in_draft[self.candidate_ids.cpu()] = True
        tensors = {
            **published_layer("midlayer", self.attention, self.mlp),
            "midlayer.input_layernorm.weight": self.embedding_norm.weight,
            "midlayer.hidden_norm.weight": self.state_norm.weight,
            "midlayer.post_attention_layernorm.weight": self.mlp_norm.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.output.weight,
            "d2t": self.candidate_ids.cpu() - torch.arange(self.config.draft_vocab_size),
            "t2d": in_draft,
        }
        for index, layer in enumerate(self.layers, start=1):
            assert isinstance(layer, DraftLayer)
            assert layer.input_norm is not None
            tensors |= published_layer(f"layers.{index}", layer.attention, layer.mlp)
            tensors[f"layers.{index}.input_layernorm.weight"] = layer.input_norm.weight
            tensors[f"layers.{index}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
        if isinstance(self.fc, Linear):
            tensors["fc.weight"] = self.fc.weight
            if self.fc.bias is not None:
                tensors["fc.bias"] = self.fc.bias
        if self.input_norm is not None:
            tensors["input_norm.weight"] = self.input_norm.weight
        for index, norm in enumerate(self.fc_norms):
            assert isinstance(norm, RMSNorm)
            tensors[f"fc_norm.{index}.weight"] = norm.weight
        if self.projection is not None:
            tensors |= self.projection.checkpoint_tensors()
        return tensors


def tensor_shapes(config: Eagle3Config, names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every trained tensor of the published layout and its shape, with the optional biases and norms among `names`."""
    hidden = config.hidden_size
    shapes = layer_shapes(config.layers, "midlayer", names, 2 * hidden, _FIRST_LAYER_NORMS)
    for index in range(1, config.layers.num_layers):
        shapes |= layer_shapes(config.layers, f"layers.{index}", names, hidden, _LAYER_NORMS)
    if config.has_fc:
        shapes["fc.weight"] = (hidden, config.feature_size)
        if "fc.bias" in names:
            shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.feature_size,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(len(config.aux_layers))}
    return shapes | {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}


def load_eagle3(
    files: HeadFiles, target: TargetWeights, options: HeadOptions, dtype: torch.dtype, device: torch.device
) -> Eagle3Head:
    """See `HeadKind.load`."""
    config, source = Eagle3Config.normalise(files, target.config, options), files.tensors
    if options.token_map is not None:
        raise ValueError("token_map: an EAGLE-3 head brings its own vocabulary map; the option is for EAGLE-1 heads")
    vocab_size = target.config.vocab_size
    shapes = tensor_shapes(config, source.names)
    check_names(source, {*shapes, *_OPTIONAL_TENSORS}, "EAGLE-3")
    warn_of_layer_count(files, config.layers)
    tensors = read_tensors(source, shapes, dtype)
    tensors["d2t"] = read_vocabulary_map(source, config.draft_vocab_size, vocab_size)
    token_ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    projection = read_candidate_projection(
        source, config.raw, options, token_ids, (vocab_size, config.hidden_size), dtype
    )
    if "embed_tokens.weight" in source.names:
        own = {"embed_tokens.weight": (vocab_size, config.hidden_size)}
        embedding = read_tensors(source, own, dtype)["embed_tokens.weight"]
    elif config.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{source.origin}: tensor embed_tokens.weight is missing; a head of {config.hidden_size} cannot use the "
            f"target's embedding of {target.config.hidden_size}"
        )
    else:
        embedding = target.embedding(dtype)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    projection = None if projection is None else projection.to(device)
    return Eagle3Head(config, tensors, embedding.to(device), target.config.max_positions, projection=projection)
