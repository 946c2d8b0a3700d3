"""Multi-token prediction modules (DeepSeek-V3, arXiv:2412.19437, section 2.2) as draft heads.

The pair at position i is (target feature at i, embedding of token i + 1): both are normed, `eh_proj` joins them, one
decoder layer follows, and the shared output projection reads its normed state. The one module is used again for every
deeper level, with its own state in place of the feature.

Letters: T rows, H hidden, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.head import Candidates, DraftHead, HeadCache, Ranker
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.linear import Linear
from eyas.models.mtp_block import MtpBlock, block_cache, block_config
from eyas.models.mtp_layout import GLUE, SHARED_COPIES, MtpTensors
from eyas.models.mtp_tensors import module_of
from eyas.models.target_weights import TargetWeights


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Normalised config of a module.

    Args:
        capture: the target state it reads: by default the one after the final norm, which the output projection reads
            too and the published engines feed it.
        plausible_captures: that one and the state before the norm.
        hidden_first, masks_first, feeds_back_norm: see `MtpLayout`.
        has_experts: the layer's MLP is a mixture of experts.
        block: the target's `config.json`, which describes the layer.
    """

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    cache: HeadCache
    capture: tuple[int, ...]
    plausible_captures: tuple[tuple[int, ...], ...]
    hidden_first: bool
    masks_first: bool
    feeds_back_norm: bool
    has_experts: bool
    block: dict[str, Any]

    @property
    def max_depth(self) -> None:
        return None

    @staticmethod
    def normalise(files: HeadFiles, target: DecoderConfig, options: HeadOptions) -> MtpConfig:
        """See `HeadKind.normalise`."""
        files = module_of(files)
        raw = files.config
        has_experts = any(name.startswith("block.mlp.experts.") for name in files.tensors.names)
        layer = block_config(raw["block"], has_experts)
        for name, of_target in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
            if getattr(layer, name) != of_target:
                raise ValueError(f"{name}: the MTP module has {getattr(layer, name)}, the target {of_target}")
        plausible: tuple[tuple[int, ...], ...] = ((target.final_index,), (target.num_layers,))
        if options.aux_layers is not None:
            if len(options.aux_layers) != 1 or not 0 <= options.aux_layers[0] <= target.final_index:
                raise ValueError(
                    f"aux_layers: an MTP module reads one state of the target, 0 to {target.final_index}, got "
                    f"{list(options.aux_layers)}"
                )
            plausible = (options.aux_layers,)
        return MtpConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            rms_norm_eps=layer.rms_norm_eps,
            cache=block_cache(layer),
            capture=plausible[0],
            plausible_captures=plausible,
            hidden_first=raw["hidden_first"],
            masks_first=raw["masks_first"],
            feeds_back_norm=raw["feeds_back_norm"],
            has_experts=has_experts,
            block=raw["block"],
        )


class MtpHead(DraftHead):
    """One module. Its states are what it feeds back: after the final norm if `feeds_back_norm`, else before it."""

    candidate_ids: Tensor

    def __init__(
        self, config: MtpConfig, block: MtpBlock, glue: dict[str, Tensor], embedding: Tensor, output: Tensor
    ) -> None:
        """Args:
        glue: the tensors of `GLUE`.
        embedding, output: `[V, H]`.
        """
        super().__init__()
        self.config = config
        self.capture, self.cache = config.capture, config.cache
        self.state_size = config.hidden_size
        self.dtype, self.device = embedding.dtype, embedding.device
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.embedding_norm, self.feature_norm, self.norm = (
            block.norm(glue[f"{name}.weight"], config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")
        )
        self.projection = Linear(glue["eh_proj.weight"])
        self.block = block
        self.output = Linear(output)
        self.register_buffer(
            "candidate_ids", torch.arange(config.vocab_size, device=embedding.device), persistent=False
        )
        self.requires_grad_(False)

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return self.step(features, token_ids, positions, attention)

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        embedded = F.embedding(token_ids, self.embedding)
        if self.config.masks_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        parts = [self.embedding_norm(embedded), self.feature_norm(states)]
        if self.config.hidden_first:
            parts.reverse()
        state: Tensor = self.block(self.projection(torch.cat(parts, dim=-1)), positions, attention)
        return self.norm(state) if self.config.feeds_back_norm else state

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        return ranker.rank(self.logits(states), self.candidate_ids)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the vocabulary after each state, `[T, V]`."""
        logits: Tensor = self.output(states if self.config.feeds_back_norm else self.norm(states))
        return logits


def load_mtp(
    files: HeadFiles, target: TargetWeights, options: HeadOptions, dtype: torch.dtype, device: torch.device
) -> MtpHead:
    """See `HeadKind.load`."""
    files = module_of(files)
    config, source = MtpConfig.normalise(files, target.config, options), files.tensors
    assert isinstance(source, MtpTensors)
    block = MtpBlock(block_config(config.block, config.has_experts))
    for name in sorted(set(source.names).difference(block.tensor_names(source), GLUE, SHARED_COPIES)):
        if not name.endswith("rotary_emb.inv_freq"):  # some exports carry this derived table
            name = source.file_name(name)
            raise ValueError(f"{source.origin}: tensor {name} belongs to a variant of MTP that is not supported")
    hidden, shared = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes = {name: (hidden, 2 * hidden) if name == "eh_proj.weight" else (hidden,) for name in GLUE}
    shapes |= {name: shared for name in SHARED_COPIES if name in source.names}
    tensors = source.read_all(shapes, dtype)
    block.load(source, dtype, device)
    embedding = tensors.pop("embed_tokens.weight", None)
    output = tensors.pop("head.weight", None)
    return MtpHead(
        config,
        block,
        {name: tensor.to(device) for name, tensor in tensors.items()},
        (target.embedding(dtype) if embedding is None else embedding).to(device),
        (target.output(dtype) if output is None else output).to(device),
    )
