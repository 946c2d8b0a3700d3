"""Medusa heads (arXiv:2401.10774): head i reads the target's state at a position t and foretells token t + 2 + i.

A head is a few residual blocks `x + SiLU(W x + b)` and a projection onto the vocabulary: its own, one that all heads
share, or the target's. Heads do not see what the others chose, so all levels of a tree come from one state.

Letters: T rows, K heads, n levels asked for, H hidden, V target vocabulary, Vd scored vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.head import Candidates, DraftHead, Ranker
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.linear import Linear
from eyas.models.medusa_config import SHARED_PROJECTION, TOKEN_MAP, MedusaConfig
from eyas.models.stacked_linear import StackedLinear
from eyas.models.target_weights import TargetWeights
from eyas.models.tensor_source import TensorSource, read_tensors
from eyas.models.vocabulary_map import read_token_map


class MedusaHead(DraftHead):
    """K heads side by side; their state is the target's own.

    Args:
        blocks: one `StackedLinear [K, H, H]` for each residual block.
        output: `StackedLinear [K, Vd, H]`, or `Linear [Vd, H]` for all heads.
        candidate_ids: target id of every scored token, int64 `[Vd]`.
    """

    cache = None
    is_path_dependent = False
    candidate_ids: Tensor

    def __init__(
        self, config: MedusaConfig, blocks: Iterable[StackedLinear], output: Linear, candidate_ids: Tensor
    ) -> None:
        super().__init__()
        self.config = config
        self.capture, self.max_depth = config.capture, config.max_depth
        self.state_size = config.hidden_size
        self.dtype, self.device = output.weight.dtype, output.weight.device
        self.blocks = nn.ModuleList(blocks)
        self.output = output
        self.register_buffer("candidate_ids", candidate_ids, persistent=False)

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The features `[T, H]`: a state is the target's."""
        return features

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        raise NotImplementedError("a Medusa head drafts all levels at once; it has no state after a drafted token")

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        return ranker.rank(self.logits(states, levels).flatten(0, 1), self.candidate_ids)

    def logits(self, states: Tensor, levels: range) -> Tensor:
        """Scores at each of `levels` after each state `[T, H]`, `[T, n, Vd]`."""
        hidden = self.hidden(states, levels)
        if isinstance(self.output, StackedLinear):
            logits: Tensor = self.output(hidden, levels.start - 1).transpose(0, 1)
        else:
            logits = self.output(hidden.transpose(0, 1))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def hidden(self, states: Tensor, levels: range) -> Tensor:
        """What the projections read at each of `levels` (1 is head 0's) after each state `[T, H]`, `[n, T, H]`."""
        if levels.step != 1 or not 1 <= levels.start < levels.stop <= self.config.num_heads + 1:
            raise ValueError(f"levels: {levels} were asked of {self.config.num_heads} Medusa heads, one a level")
        x = states.expand(len(levels), -1, -1)
        for block in self.blocks:
            x = x + F.silu(block(x, levels.start - 1))
        return x

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The heads in the layout of their authors; projections shared with the target are left out."""
        tensors = {}
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, StackedLinear)
            for head in range(self.config.num_heads):
                tensors[f"{head}.{layer}.linear.weight"] = block.weight[head]
                if block.bias is not None:
                    tensors[f"{head}.{layer}.linear.bias"] = block.bias[head]
        if self.config.projection != "target":
            own = isinstance(self.output, StackedLinear)
            for head in range(self.config.num_heads):
                weight = self.output.weight[head] if own else self.output.weight
                tensors[f"{head}.{self.config.num_layers}.weight"] = weight
        return tensors


def tensor_shapes(config: MedusaConfig, has_token_map: bool = False) -> dict[str, tuple[int, ...]]:
    """Every stored tensor under the kind's names, and its shape."""
    hidden, heads = config.hidden_size, range(config.num_heads)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in heads:
        for layer in range(config.num_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            if config.has_bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    if config.projection == "own":
        shapes |= {f"lm_heads.{head}.weight": (config.projection_rows, hidden) for head in heads}
    if config.projection == "shared":
        shapes[SHARED_PROJECTION] = (config.projection_rows, hidden)
    if has_token_map:
        shapes[TOKEN_MAP] = (config.draft_vocab_size,)
    return shapes


def load_medusa(
    files: HeadFiles, target: TargetWeights, options: HeadOptions, dtype: torch.dtype, device: torch.device
) -> MedusaHead:
    """See `HeadKind.load`."""
    config, source = MedusaConfig.normalise(files, target.config, options), files.tensors
    shapes = tensor_shapes(config, TOKEN_MAP in source.names)
    if unknown := sorted(set(source.names).difference(shapes)):
        raise ValueError(f"{source.origin}: tensor {unknown[0]} belongs to a variant of Medusa that is not supported")
    ids = _candidate_ids(config, source, target.config, options)
    is_cut = len(ids) < config.projection_rows or config.projection == "target"
    rows = ids if is_cut and not torch.equal(ids, torch.arange(config.projection_rows)) else None

    def stack(names: list[str], rows: Tensor | None = None) -> Tensor:
        """Same-shaped tensors side by side, or the `rows` of them, read one at a time."""
        shape = shapes[names[0]]
        stacked = torch.empty(len(names), *(shape if rows is None else (len(rows), *shape[1:])), dtype=dtype)
        for index, name in enumerate(names):
            tensor = read_tensors(source, {name: shapes[name]}, dtype)[name]
            stacked[index] = tensor if rows is None else tensor[rows]
        return stacked.to(device)

    heads = range(config.num_heads)
    blocks = [
        StackedLinear(
            stack([f"blocks.{head}.layers.{layer}.weight" for head in heads]),
            stack([f"blocks.{head}.layers.{layer}.bias" for head in heads]) if config.has_bias else None,
        )
        for layer in range(config.num_layers)
    ]
    if config.projection == "own":
        output: Linear = StackedLinear(stack([f"lm_heads.{head}.weight" for head in heads], rows))
    elif config.projection == "shared":
        output = Linear(stack([SHARED_PROJECTION], rows)[0])
    else:
        weight = target.output(dtype)
        output = Linear((weight if rows is None else weight[rows]).to(device))
    return MedusaHead(config, blocks, output, ids.to(device))


def _candidate_ids(config: MedusaConfig, source: TensorSource, target: DecoderConfig, options: HeadOptions) -> Tensor:
    """Target ids of the scored tokens, int64 `[Vd]`."""
    if options.token_map is not None:
        return read_token_map(Path(options.token_map), target.vocab_size)
    if TOKEN_MAP not in source.names:
        return torch.arange(target.vocab_size)
    ids = source.read(TOKEN_MAP, (config.draft_vocab_size,), torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or ids.unique().numel() != ids.numel():
        raise ValueError(f"{source.origin}: {TOKEN_MAP} must list different ids below {target.vocab_size}")
    return ids
