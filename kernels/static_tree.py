"""Trees of a fixed shape: the same ranks at every step, whatever the scores (Medusa, arXiv:2401.10774; EAGLE-1).

A shape is a list of rank paths: (0, 2) is the third best child of the root's best child.

Letters: B requests, W candidates per parent, P nodes without the root, E nodes of a level that have children.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from eyas.kernels.grow import Frontier
from eyas.kernels.tree import PADDING_PARENT, ROOT_PARENT, DraftTrees


@dataclass(frozen=True, slots=True)
class TreeChoices:
    """A tree's shape.

    Args:
        paths: rank paths ordered by depth, then by rank; every path's parent is among them.
    """

    paths: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(paths: Iterable[Sequence[int]]) -> TreeChoices:
        """From rank paths in any order.

        Raises:
            ValueError: naming the path that is empty, negative, repeated, or lacks its parent.
        """
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        if not ordered:
            raise ValueError("tree: a shape needs at least one path")
        known: set[tuple[int, ...]] = {()}
        for path in ordered:
            if not path or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
                raise ValueError(f"tree: {list(path)} is not a path of ranks 0, 1, 2 …")
            if path in known:
                raise ValueError(f"tree: the path {list(path)} occurs twice")
            if path[:-1] not in known:
                raise ValueError(f"tree: the path {list(path)} lacks its parent {list(path[:-1])}")
            known.add(path)
        return TreeChoices(tuple(ordered))

    @staticmethod
    def cartesian(widths: Sequence[int]) -> TreeChoices:
        """The best `widths[d]` candidates of every level d under every node of the level above."""
        if not widths or min(widths) < 1:
            raise ValueError(f"tree: a Cartesian product needs widths of at least 1, got {list(widths)}")
        levels = range(1, len(widths) + 1)
        return TreeChoices.of(path for depth in levels for path in product(*map(range, widths[:depth])))

    @property
    def num_nodes(self) -> int:
        """Root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    def num_candidates(self, level: int) -> int:
        """Candidates per parent the shape asks for at a level, the first being 1."""
        return 1 + max(path[-1] for path in self.paths if len(path) == level)

    @property
    def num_expanded(self) -> int:
        """Nodes below the root that have children: what a head is asked to extend."""
        return len({path[:-1] for path in self.paths if len(path) > 1})

    def truncated(self, depth: int) -> TreeChoices:
        """The same without levels below `depth`."""
        return TreeChoices(tuple(path for path in self.paths if len(path) <= depth))


class StaticGrowth:
    """Grows one shape for a batch; the interface of `TreeGrowth`."""

    def __init__(self, choices: TreeChoices) -> None:
        self._choices = choices
        self._levels = [[path for path in choices.paths if len(path) == level] for level in range(1, choices.depth + 1)]
        self._tokens: list[Tensor] = []
        self._parents_of_level: list[tuple[int, ...]] = [()]
        self.frontier: Frontier

    def num_candidates(self, level: int) -> int:
        """See `TreeChoices.num_candidates`."""
        return self._choices.num_candidates(level)

    def start(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Take the root's children from `[B, W]` candidates, best first."""
        root = torch.zeros(tokens.shape[0], 1, device=tokens.device)
        return self._take(tokens[:, None], log_probs[:, None], root)

    def expand(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Take the next level from `[B, E, W]` candidates of the frontier's nodes."""
        return self._take(tokens, log_probs, self.frontier.scores)

    def _take(self, tokens: Tensor, log_probs: Tensor, parent_scores: Tensor) -> Frontier:
        level = len(self._tokens)
        nodes = self._levels[level]
        rank_of_parent = {path: rank for rank, path in enumerate(self._parents_of_level)}
        parents = torch.tensor([rank_of_parent[path[:-1]] for path in nodes], device=tokens.device)
        ranks = torch.tensor([path[-1] for path in nodes], device=tokens.device)
        taken = tokens[:, parents, ranks]  # [B, nodes of the level]
        scores = parent_scores[:, parents] + log_probs[:, parents, ranks].float()
        self._tokens.append(taken)
        has_children = {path[:-1] for path in (self._levels[level + 1] if level + 1 < len(self._levels) else [])}
        expanded = [index for index, path in enumerate(nodes) if path in has_children]
        self._parents_of_level = [nodes[index] for index in expanded]
        first = 1 + sum(len(nodes) for nodes in self._levels[:level])
        kept = torch.tensor(expanded, dtype=torch.int64, device=tokens.device)
        batch = tokens.shape[0]
        self.frontier = Frontier(
            tokens=taken[:, kept],
            scores=scores[:, kept],
            parent_ranks=parents[kept].expand(batch, -1),
            pool_indices=(kept + first).expand(batch, -1),
        )
        return self.frontier

    def finish(self, root_tokens: Tensor, num_nodes: Tensor) -> DraftTrees:
        """The trees, cut to each request's node budget `[B]` from the shape's end."""
        if int(num_nodes.min()) < 1:
            raise ValueError(f"node budget must be at least 1 (the root), got {num_nodes.tolist()}")
        index = {path: node for node, path in enumerate(((), *self._choices.paths))}
        device = root_tokens.device
        parents = torch.tensor([ROOT_PARENT, *(index[path[:-1]] for path in self._choices.paths)], device=device)
        tokens = torch.cat([root_tokens.reshape(-1, 1), *self._tokens], dim=1)
        kept = num_nodes.clamp(max=self._choices.num_nodes)
        most = int(kept.max())
        past_budget = torch.arange(most, device=device) >= kept[:, None]
        return DraftTrees(
            tokens=tokens[:, :most].masked_fill(past_budget, 0),
            parents=parents[:most].expand(len(kept), -1).masked_fill(past_budget, PADDING_PARENT),
            num_nodes=kept,
        )
