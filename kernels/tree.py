"""The draft tree: a batch of ragged trees as padded node arrays, and their invariants.

Letters: B requests, N nodes (root included, padded to the largest request of the batch).
Knows nothing of models, pages or scores' origin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROOT_PARENT = -1
PADDING_PARENT = -2


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """One draft tree per request; node 0 is the root, the newest token of the text.

    Args:
        tokens: target-vocabulary ids, int64 `[B, N]`; padding holds 0.
        parents: index of each node's parent in the same row, int64 `[B, N]`: `-1` at the root, `-2` in padding.
        num_nodes: nodes of each request, root included, int64 `[B]`.
    """

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor

    @property
    def batch_size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def max_nodes(self) -> int:
        return int(self.tokens.shape[1])

    def validate(self) -> None:
        """Raise `ValueError` unless every row is a tree in topological order with distinct siblings.

        A missing or later parent is an error, never treated as the root; a broken tree would make the mask let a node
        see tokens that are not its ancestors.
        """
        if self.tokens.shape != self.parents.shape or self.num_nodes.shape != self.tokens.shape[:1]:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)}, parents {tuple(self.parents.shape)} and num_nodes "
                f"{tuple(self.num_nodes.shape)} do not describe one batch of trees"
            )
        for row in range(self.batch_size):
            count = int(self.num_nodes[row])
            if not 1 <= count <= self.max_nodes:
                raise ValueError(f"tree {row}: num_nodes is {count}, expected 1 to {self.max_nodes}")
            parents = self.parents[row].tolist()
            tokens = self.tokens[row].tolist()
            if parents[0] != ROOT_PARENT:
                raise ValueError(f"tree {row}: node 0 must be the root (parent -1), found parent {parents[0]}")
            edges = set()
            for node in range(1, count):
                if not 0 <= parents[node] < node:
                    raise ValueError(
                        f"tree {row}: node {node} names parent {parents[node]}, which is not an earlier node"
                    )
                edge = (parents[node], tokens[node])
                if edge in edges:
                    raise ValueError(f"tree {row}: node {edge[0]} has two children with token {edge[1]}")
                edges.add(edge)
            if any(parent != PADDING_PARENT for parent in parents[count:]):
                raise ValueError(f"tree {row}: padding after node {count - 1} must have parent -2")


def root_trees(root_tokens: Tensor) -> DraftTrees:
    """Trees of the root alone, i.e. no speculation, from root tokens `[B]`."""
    return DraftTrees(
        tokens=root_tokens.reshape(-1, 1),
        parents=torch.full((root_tokens.numel(), 1), ROOT_PARENT, dtype=torch.int64, device=root_tokens.device),
        num_nodes=torch.ones(root_tokens.numel(), dtype=torch.int64, device=root_tokens.device),
    )


def pad_trees(rows: list[tuple[list[int], list[int]]]) -> DraftTrees:
    """Stack ragged `(tokens, parents)` rows into one padded batch."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [list(row) + [0] * (width - len(row)) for row, _ in rows]
    parents = [list(row) + [PADDING_PARENT] * (width - len(row)) for _, row in rows]
    return DraftTrees(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int64),
        num_nodes=torch.tensor([len(row) for row, _ in rows], dtype=torch.int64),
    )
