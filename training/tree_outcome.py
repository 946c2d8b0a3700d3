"""How long the accepted path of a dynamic tree would be if its edges were scored so: trees grown from samples.

Along a text the candidates after every drafted token are known; after other tokens they are not, because the head was
not run there. Those nodes get the candidates of some other base at the same depth, so that the text's path competes
with as many and as good rivals as in a real tree.

Letters: N bases, D levels, W candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.kernels.tree import DraftTrees
from eyas.training.prior_samples import PathSamples

Score = Callable[[Tensor, int], Tensor]
"""Raw log-probabilities `[N, E, W]` of a level, the first being 1, to scores."""


def expected_lengths(samples: PathSamples, score: Score, budgets: list[int], width: int, depth: int) -> list[float]:
    """Mean tokens per verify step, bonus token included, of trees with each node budget (root included)."""
    ends = samples.log_probs[:, :depth, 0].isfinite().all(dim=1) & samples.is_counted[:, 0]
    samples = samples.of(ends)
    if not samples.accepted.shape[0]:
        return [1.0 for _ in budgets]
    log_probs = samples.log_probs[:, :depth, :width]
    width = log_probs.shape[2]
    accepted = samples.accepted[:, :depth]
    path = torch.where(samples.is_counted[:, :depth] & (accepted < width), accepted, -1)
    growth = TreeGrowth(width)
    count = path.shape[0]
    ranks = torch.arange(width).expand(count, width)
    frontier = growth.start(ranks, score(log_probs[:, :1], 1)[:, 0])
    is_path = frontier.tokens == path[:, :1]
    for level in range(1, depth):
        rivals = log_probs[:, level].roll(level, dims=0)
        raw = torch.where(is_path[:, :, None], log_probs[:, level, None], rivals[:, None])
        parents = is_path
        frontier = growth.expand(ranks[:, None].expand(-1, width, -1), score(raw, level + 1))
        is_path = parents.gather(1, frontier.parent_ranks) & (frontier.tokens == path[:, level, None])
    roots = torch.zeros(count, dtype=torch.int64)
    is_counted = samples.is_counted[:, :depth]
    return [_length(growth.finish(roots, torch.full((count,), budget)), path, is_counted) for budget in budgets]


def _length(trees: DraftTrees, path: Tensor, is_counted: Tensor) -> float:
    """Mean tokens per step; paths whose text goes another way than the target leave the count there (Kaplan-Meier)."""
    node = torch.zeros(path.shape[0], 1, dtype=torch.int64)
    is_open = torch.ones(path.shape[0], dtype=torch.bool)
    length, share = 1.0, 1.0
    for level in range(path.shape[1]):
        is_open = is_open & is_counted[:, level]
        num_reached = int(is_open.sum())
        is_next = (trees.parents == node) & (trees.tokens == path[:, level, None])
        is_open = is_open & is_next.any(dim=1)
        node = is_next.int().argmax(dim=1, keepdim=True)
        share *= int(is_open.sum()) / max(1, num_reached)
        length += share
    return length
