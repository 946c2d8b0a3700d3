"""The draft trees of one step, padded into a batch, with everything a verify pass needs to know of them.

Letters: B decoding requests, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.build import TreeLinks, node_depths, tree_links
from eyas.kernels.tree import DraftTrees, pad_trees


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """The step's trees with everything verify needs.

    Args:
        row_index: flat row of each node, padding repeating the root's, int64 `[B, N]`.
        depths: per request, per node.
    """

    trees: DraftTrees
    links: TreeLinks
    committed: Tensor
    row_index: Tensor
    is_real: Tensor
    depths: list[list[int]]
    num_rows: int

    @property
    def is_uniform(self) -> bool:
        return self.num_rows == self.row_index.numel()

    @staticmethod
    def build(drafted: list[tuple[list[int], list[int]]], committed: list[int], device: torch.device) -> TreeBatch:
        trees = pad_trees(drafted)
        trees.validate()
        trees = DraftTrees(trees.tokens.to(device), trees.parents.to(device), trees.num_nodes.to(device))
        first_rows = torch.cumsum(trees.num_nodes, dim=0) - trees.num_nodes
        nodes = torch.arange(trees.max_nodes, device=device)
        is_real = nodes < trees.num_nodes[:, None]
        return TreeBatch(
            trees=trees,
            links=tree_links(trees),
            committed=torch.tensor(committed, device=device),
            row_index=first_rows[:, None] + torch.where(is_real, nodes, 0),
            is_real=is_real,
            depths=node_depths(trees).tolist(),
            num_rows=int(trees.num_nodes.sum()),
        )
