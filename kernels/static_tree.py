"""Trees of a fixed shape: the same ranks at every step, whatever the scores (Medusa, arXiv:2401.10774; EAGLE-1).

A shape is a list of rank paths: (0, 2) is the third best child of the root's best child.

Letters: B requests, W candidates per parent, P nodes without the root, E nodes of a level that have children.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import overload

import torch
from torch import Tensor

from eyas.kernels.grow import Frontier
from eyas.kernels.selection import SelectedTrees, check_budgets, check_max_nodes, pad_selected
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


@dataclass(frozen=True, slots=True)
class LevelIndices:
    """What of a level's candidates `[B, E, W]` a shape takes, on a device.

    Args:
        parents, ranks: of each node of the level, int64.
        expanded: nodes of the level that have children, int64.
        first_index: pool index of the level's first node.
    """

    parents: Tensor
    ranks: Tensor
    expanded: Tensor
    first_index: int


@dataclass(frozen=True, slots=True)
class ShapeIndices:
    """A shape as tensors. Made once and kept, it leaves a draft nothing to copy to the device.

    Args:
        levels: the levels below the root.
        parents: of all nodes, root included, int64 `[P + 1]`.
    """

    levels: tuple[LevelIndices, ...]
    parents: Tensor

    @staticmethod
    def of(choices: TreeChoices, device: torch.device) -> ShapeIndices:
        index = {path: node for node, path in enumerate(((), *choices.paths))}
        has_children = {path[:-1] for path in choices.paths}
        expanded: list[tuple[int, ...]] = [()]
        levels, first = [], 1
        for depth in range(1, choices.depth + 1):
            nodes = [path for path in choices.paths if len(path) == depth]
            rank_of_parent = {path: rank for rank, path in enumerate(expanded)}
            places = [place for place, path in enumerate(nodes) if path in has_children]
            levels.append(
                LevelIndices(
                    parents=torch.tensor([rank_of_parent[path[:-1]] for path in nodes], device=device),
                    ranks=torch.tensor([path[-1] for path in nodes], device=device),
                    expanded=torch.tensor(places, dtype=torch.int64, device=device),
                    first_index=first,
                )
            )
            expanded = [nodes[place] for place in places]
            first += len(nodes)
        parents = [ROOT_PARENT, *(index[path[:-1]] for path in choices.paths)]
        return ShapeIndices(tuple(levels), torch.tensor(parents, device=device))


class StaticGrowth:
    """Grows one shape for a batch; the interface of `TreeGrowth`.

    With indices given and `max_nodes` given to `finish`, nothing here reads a value from the device or copies one to
    it.
    """

    def __init__(self, choices: TreeChoices, indices: ShapeIndices | None = None) -> None:
        """Args:
        indices: the shape on the device of the candidates; None means to make them at `start`.
        """
        self._choices = choices
        self._indices = indices
        self._tokens: list[Tensor] = []
        self.frontier: Frontier

    def num_candidates(self, level: int) -> int:
        """See `TreeChoices.num_candidates`."""
        return self._choices.num_candidates(level)

    def start(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Take the root's children from `[B, W]` candidates, best first."""
        if self._indices is None:
            self._indices = ShapeIndices.of(self._choices, tokens.device)
        root = torch.zeros(tokens.shape[0], 1, device=tokens.device)
        return self._take(tokens[:, None], log_probs[:, None], root, self._indices.levels[0])

    def expand(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """Take the next level from `[B, E, W]` candidates of the frontier's nodes."""
        return self._take(tokens, log_probs, self.frontier.scores, self._started().levels[len(self._tokens)])

    def _take(self, tokens: Tensor, log_probs: Tensor, parent_scores: Tensor, level: LevelIndices) -> Frontier:
        taken = tokens[:, level.parents, level.ranks]  # [B, nodes of the level]
        scores = parent_scores[:, level.parents] + log_probs[:, level.parents, level.ranks].float()
        self._tokens.append(taken)
        batch = tokens.shape[0]
        self.frontier = Frontier(
            tokens=taken[:, level.expanded],
            scores=scores[:, level.expanded],
            parent_ranks=level.parents[level.expanded].expand(batch, -1),
            pool_indices=(level.expanded + level.first_index).expand(batch, -1),
        )
        return self.frontier

    @overload
    def finish(self, root_tokens: Tensor, num_nodes: Tensor) -> DraftTrees: ...
    @overload
    def finish(self, root_tokens: Tensor, num_nodes: Tensor, max_nodes: int) -> SelectedTrees: ...
    def finish(
        self, root_tokens: Tensor, num_nodes: Tensor, max_nodes: int | None = None
    ) -> DraftTrees | SelectedTrees:
        """The trees, cut to each request's node budget `[B]` from the shape's end.

        Args:
            max_nodes: as for `kernels.selection.select_within`; a shape cut from its end is always closed.
        """
        if max_nodes is None:
            check_budgets(num_nodes)
            return self._cut(root_tokens, num_nodes, min(int(num_nodes.max()), self._choices.num_nodes))
        check_max_nodes(max_nodes)
        trees = self._cut(root_tokens, num_nodes, min(max_nodes, self._choices.num_nodes))
        return SelectedTrees(pad_selected(trees, num_nodes, max_nodes), torch.ones_like(num_nodes, dtype=torch.bool))

    def _cut(self, root_tokens: Tensor, num_nodes: Tensor, most: int) -> DraftTrees:
        tokens = torch.cat([root_tokens.reshape(-1, 1), *self._tokens], dim=1)[:, :most]
        kept = num_nodes.clamp(max=most)
        past_budget = torch.arange(most, device=tokens.device) >= kept[:, None]
        return DraftTrees(
            tokens=tokens.masked_fill(past_budget, 0),
            parents=self._started().parents[:most].expand(len(kept), -1).masked_fill(past_budget, PADDING_PARENT),
            num_nodes=kept,
        )

    def _started(self) -> ShapeIndices:
        if self._indices is None:
            raise RuntimeError("a draft begins with `start`")
        return self._indices
