"""Growing a draft tree level by level (EAGLE-2, arXiv:2406.16858, section 4).

Scores are cumulative log-probabilities. The `width` children of each of a level's `width` survivors compete for the
next level; after the last level every candidate ever scored competes for the node budget.

Ancestor closure holds by construction. Edge log-probabilities are clamped to at most 0 and IEEE addition rounds
monotonically, so a child's score never exceeds its parent's; candidates are pooled level by level and every sort is
stable, so equal scores keep (depth, index) order and the ancestor comes first. Any prefix of that order is closed.

Letters: B requests, W width, P pooled candidates, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.tree import PADDING_PARENT, ROOT_PARENT, DraftTrees


@dataclass(frozen=True, slots=True)
class Frontier:
    """The survivors of the newest level: the nodes the head is asked to extend next.

    Args:
        tokens: `[B, W]`.
        scores: cumulative log-probabilities, float32 `[B, W]`.
        parent_ranks: which survivor of the level before each one descends from, `[B, W]`; zeros at depth 1.
        pool_indices: each survivor's index among all candidates, the root being 0, `[B, W]`.
    """

    tokens: Tensor
    scores: Tensor
    parent_ranks: Tensor
    pool_indices: Tensor


class TreeGrowth:
    """Candidate pool of one draft for a batch. Feed it `start`, then `expand` once per further level, then `finish`."""

    def __init__(self, width: int) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width = width
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._num_pooled = 1  # the root
        self.frontier: Frontier

    def num_candidates(self, level: int) -> int:
        """Candidates per parent asked for at a level, the first being 1."""
        return self.width

    def start(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Pool the root's children `[B, W]`, best first, and make all of them survivors."""
        self._check(tokens, log_probs, (tokens.shape[0], self.width))
        scores = _edge_scores(log_probs)
        pool_indices = torch.arange(1, self.width + 1, device=tokens.device).expand_as(tokens)
        self._pool(tokens, torch.zeros_like(tokens), scores)
        self.frontier = Frontier(tokens, scores, torch.zeros_like(tokens), pool_indices)
        return self.frontier

    def expand(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Pool `[B, W, W]` children (`[:, r]` belong to survivor r) and keep the best `width` as the new survivors."""
        batch, width = self.frontier.tokens.shape
        self._check(tokens, log_probs, (batch, width, width))
        scores = (self.frontier.scores[:, :, None] + _edge_scores(log_probs)).flatten(1)
        tokens = tokens.flatten(1)
        parents = self.frontier.pool_indices.repeat_interleave(width, dim=1)
        first = self._num_pooled
        self._pool(tokens, parents, scores)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
        self.frontier = Frontier(
            tokens=tokens.gather(1, best),
            scores=scores.gather(1, best),
            parent_ranks=best // width,
            pool_indices=best + first,
        )
        return self.frontier

    def finish(self, root_tokens: Tensor, num_nodes: Tensor) -> DraftTrees:
        """Spend each request's node budget `[B]` (root included) on the best candidates of the whole pool.

        A budget larger than the pool yields the whole pool.
        """
        tokens = torch.cat(self._tokens, dim=1)  # [B, P]
        parents = torch.cat(self._parents, dim=1)
        scores = torch.cat(self._scores, dim=1)
        return select_nodes(root_tokens, tokens, parents, scores, num_nodes)

    def _pool(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> None:
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._scores.append(scores)
        self._num_pooled += tokens.shape[1]

    @staticmethod
    def _check(tokens: Tensor, log_probs: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tokens.shape) != shape or tuple(log_probs.shape) != shape:
            raise ValueError(
                f"candidates must be {list(shape)}, got tokens {list(tokens.shape)}, log_probs {list(log_probs.shape)}"
            )


def select_nodes(root_tokens: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: Tensor) -> DraftTrees:
    """Keep each request's best `num_nodes - 1` candidates of a pool and renumber them as a tree.

    Args:
        root_tokens: `[B]`.
        tokens, scores: candidates ordered by depth, `[B, P]`.
        parents: pool index of each candidate's parent, 0 being the root and candidate j having index j + 1, `[B, P]`.
        num_nodes: budget per request, root included, `[B]`.

    Raises:
        ValueError: if a kept candidate's parent is not an earlier kept candidate.
    """
    batch, pooled = tokens.shape
    if int(num_nodes.min()) < 1:
        raise ValueError(f"node budget must be at least 1 (the root), got {num_nodes.tolist()}")
    num_kept = (num_nodes - 1).clamp(max=pooled)
    most = int(num_kept.max())
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]  # [B, K]
    slots = torch.arange(most, device=tokens.device)
    past_budget = slots >= num_kept[:, None]
    order = order.masked_fill(past_budget, pooled).sort(dim=1).values  # pool order: parents before children
    safe = order.clamp(max=max(pooled - 1, 0))
    kept_parents = parents.gather(1, safe)
    # A parent with pool index 0 is the root; the others are looked up among the kept candidates.
    found = torch.searchsorted(order, kept_parents - 1)
    is_root_child = kept_parents == 0
    matches = order.gather(1, found.clamp(max=max(most - 1, 0))) == kept_parents - 1
    matches &= found < slots  # itself, a later candidate and the end of the pool are no parents
    if bool((~past_budget & ~is_root_child & ~matches).any()):
        raise ValueError("a kept candidate's parent was not kept before it: scores are not ancestor-closed")
    node_parents = torch.where(is_root_child, 0, found + 1).masked_fill(past_budget, PADDING_PARENT)
    node_tokens = tokens.gather(1, safe).masked_fill(past_budget, 0)
    root = torch.full((batch, 1), ROOT_PARENT, dtype=torch.int64, device=tokens.device)
    return DraftTrees(
        tokens=torch.cat([root_tokens.reshape(-1, 1), node_tokens], dim=1),
        parents=torch.cat([root, node_parents], dim=1),
        num_nodes=num_kept + 1,
    )


def _edge_scores(log_probs: Tensor) -> Tensor:
    """Float32 edge scores at most 0; NaN counts as impossible so that it can never outrank a real candidate."""
    return torch.nan_to_num(log_probs.float(), nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
