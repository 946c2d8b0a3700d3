"""The draft trees of one step, padded into a batch, with everything a verify pass needs to know of them.

Letters: B decoding requests, N nodes, P pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.build import MaskEncoding, TreeLayout
from eyas.kernels.kernel_set import KernelSet
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.tree import DraftTrees, pad_trees


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """The step's trees with everything verify needs.

    Args:
        committed: `[B]`, and as the host knows it.
        row_index: flat row of each node, padding repeating the root's, int64 `[B, N]`.
        token_positions: per request, the position that the token chosen after each node will take.
    """

    trees: DraftTrees
    layout: TreeLayout
    committed: Tensor
    max_committed: int
    row_index: Tensor
    token_positions: list[list[int]]
    num_rows: int

    @staticmethod
    def build(
        drafted: list[tuple[list[int], list[int]]], committed: list[int], encoding: MaskEncoding,
        device: torch.device, kernels: KernelSet,
    ) -> TreeBatch:  # fmt: skip
        """From each request's tokens and parents.

        Raises:
            ValueError: for a row that is no tree, see `DraftTrees.validate`.
        """
        trees = pad_trees(drafted)
        trees.validate()
        trees = DraftTrees(trees.tokens.to(device), trees.parents.to(device), trees.num_nodes.to(device))
        lengths = torch.tensor(committed, device=device)
        max_keys = max(count + len(tokens) for count, (tokens, _) in zip(committed, drafted, strict=True))
        layout = kernels.build_layout(
            trees.parents, trees.num_nodes, lengths, encoding, max_keys if encoding is MaskEncoding.FULL else None
        )
        first_rows = torch.cumsum(trees.num_nodes, dim=0) - trees.num_nodes
        nodes = torch.arange(trees.max_nodes, device=device)
        positions = layout.positions.tolist()
        return TreeBatch(
            trees=trees,
            layout=layout,
            committed=lengths,
            max_committed=max(committed),
            row_index=first_rows[:, None] + torch.where(nodes < trees.num_nodes[:, None], nodes, 0),
            token_positions=[
                [position + 1 for position in own[: len(tokens)]]
                for own, (tokens, _) in zip(positions, drafted, strict=True)
            ],
            num_rows=sum(len(tokens) for tokens, _ in drafted),
        )

    def paged_rows(self, page_table: Tensor, has_windows: bool) -> PagedRows:
        """The nodes as rows of attention, over pages int32 `[B, P]`; positions only for layers with windows."""
        num_nodes = self.trees.num_nodes.to(torch.int32)
        starts = torch.nn.functional.pad(torch.cumsum(num_nodes, dim=0, dtype=torch.int32), (1, 0))
        query_positions = None
        if has_windows:
            is_real = torch.arange(self.trees.max_nodes, device=num_nodes.device) < num_nodes[:, None]
            query_positions = self.layout.positions[is_real]
        return PagedRows(
            row_starts=starts,
            prefix_lengths=self.committed.to(torch.int32),
            block_lengths=num_nodes,
            page_table=page_table,
            mask=self.layout.mask,
            max_rows=self.trees.max_nodes,
            max_block=self.trees.max_nodes,
            max_prefix=self.max_committed,
            query_positions=query_positions,
            key_positions=self.layout.positions if has_windows else None,
        )
