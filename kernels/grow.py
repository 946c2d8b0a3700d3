"""Growing a draft tree level by level (EAGLE-2, arXiv:2406.16858, section 4).

Scores are cumulative log-probabilities. The `width` children of each of a level's `width` survivors compete for the
next level; after the last level every candidate ever scored competes for the node budget.

Edge log-probabilities are clamped to at most 0 and IEEE addition rounds monotonically, so a child's score never exceeds
its parent's; candidates are pooled level by level. `kernels.selection` says why that makes every choice a tree.

Letters: B requests, W width, P pooled candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from eyas.kernels.selection import SelectedTrees, most_nodes, require_closed, select_within
from eyas.kernels.tree import DraftTrees


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


@dataclass(frozen=True, slots=True)
class GrownLevel:
    """All candidates of a level, and those that survive.

    Args:
        scores: float32 `[B, W * W]`, survivor by survivor of the level above.
        parents: pool index of each candidate's parent, int64 `[B, W * W]`.
    """

    scores: Tensor
    parents: Tensor
    frontier: Frontier


@dataclass(frozen=True, slots=True)
class GrowOperations:
    """The two steps of growth that have several implementations; neither may wait for the device.

    Args:
        expand_level: as below.
        select_within: as in `kernels.selection`.
    """

    expand_level: Callable[[Frontier, Tensor, Tensor, int], GrownLevel]
    select_within: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], SelectedTrees]


class TreeGrowth:
    """Candidate pool of one draft for a batch. Feed it `start`, then `expand` once per further level, then `finish`.

    With `max_nodes` given to `finish` nothing here reads a value from the device.
    """

    def __init__(self, width: int, operations: GrowOperations | None = None) -> None:
        """Args:
        operations: None means those of this module.
        """
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width = width
        self._operations = operations or REFERENCE_OPERATIONS
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
        level = self._operations.expand_level(self.frontier, tokens, log_probs, self._num_pooled)
        self._pool(tokens.flatten(1), level.parents, level.scores)
        self.frontier = level.frontier
        return self.frontier

    @overload
    def finish(self, root_tokens: Tensor, num_nodes: Tensor) -> DraftTrees: ...
    @overload
    def finish(self, root_tokens: Tensor, num_nodes: Tensor, max_nodes: int) -> SelectedTrees: ...
    def finish(
        self, root_tokens: Tensor, num_nodes: Tensor, max_nodes: int | None = None
    ) -> DraftTrees | SelectedTrees:
        """Spend each request's node budget `[B]` (root included) on the best candidates of the whole pool.

        A budget larger than the pool yields the whole pool.

        Args:
            max_nodes: as for `kernels.selection.select_within`.
        """
        tokens = torch.cat(self._tokens, dim=1)  # [B, P]
        parents = torch.cat(self._parents, dim=1)
        scores = torch.cat(self._scores, dim=1)
        select = self._operations.select_within
        if max_nodes is not None:
            return select(root_tokens, tokens, parents, scores, num_nodes, max_nodes)
        max_nodes = most_nodes(num_nodes, tokens.shape[1])
        return require_closed(select(root_tokens, tokens, parents, scores, num_nodes, max_nodes))

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


def expand_level(frontier: Frontier, tokens: Tensor, log_probs: Tensor, first_index: int) -> GrownLevel:
    """Score the children of a level's survivors and keep the best `W` of the `W * W`, earlier ones first among equals.

    Args:
        tokens: `[B, W, W]`; `[:, r]` belong to survivor r.
        log_probs: of each edge in any floating dtype, `[B, W, W]`; above 0 counts as 0, NaN as impossible.
        first_index: pool index of the first child.
    """
    width = frontier.tokens.shape[1]
    scores = (frontier.scores[:, :, None] + _edge_scores(log_probs)).flatten(1)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    return GrownLevel(
        scores=scores,
        parents=frontier.pool_indices.repeat_interleave(width, dim=1),
        frontier=Frontier(
            tokens=tokens.flatten(1).gather(1, best),
            scores=scores.gather(1, best),
            parent_ranks=best // width,
            pool_indices=best + first_index,
        ),
    )


def _edge_scores(log_probs: Tensor) -> Tensor:
    """Float32 edge scores at most 0; NaN counts as impossible so that it can never outrank a real candidate."""
    return torch.nan_to_num(log_probs.float(), nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)


REFERENCE_OPERATIONS = GrowOperations(expand_level, select_within)
