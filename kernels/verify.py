"""Walking the accepted path: descend while some child's token is the token the target chose at this node.

Letters: B requests, N nodes, A = draft depth + 1, the longest accepted path with its root. Node arrays are N long and
accepted arrays A long; neither length ever indexes the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.build import TreeLinks
from eyas.kernels.tree import DraftTrees


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """Result of a verify walk.

    Args:
        path: node indices root first, `-1` after the end, int64 `[B, A]`.
        num_accepted: draft tokens accepted, the root not counted, int64 `[B]`.
        bonus_tokens: the target's own token after the path, int64 `[B]`.
    """

    path: Tensor
    num_accepted: Tensor
    bonus_tokens: Tensor

    def emitted_tokens(self, trees: DraftTrees, row: int) -> list[int]:
        """Tokens request `row` gains in this step: the accepted draft tokens, then the bonus token."""
        accepted = self.path[row, 1 : int(self.num_accepted[row]) + 1]
        return [*trees.tokens[row, accepted].tolist(), int(self.bonus_tokens[row])]


def verify_walk(trees: DraftTrees, links: TreeLinks, target_tokens: Tensor, draft_depth: int) -> AcceptedPaths:
    """Find the longest path that the target itself would have written.

    Args:
        trees: a request of 0 nodes, as padding requests are, accepts nothing.
        links: those that leave a request's nodes count as none, and of those that go round in circles N are followed.
        target_tokens: the token the target chose after each node, int64 `[B, N]`.
        draft_depth: levels below the root; bounds the walk.
    """
    batch = trees.batch_size
    device = trees.tokens.device
    path = torch.full((batch, draft_depth + 1), -1, dtype=torch.int64, device=device)
    path[:, 0] = 0
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    num_accepted = torch.zeros_like(node)
    descending = torch.ones(batch, dtype=torch.bool, device=device)
    for depth in range(1, draft_depth + 1):
        wanted = target_tokens.gather(1, node[:, None]).squeeze(1)
        child = torch.where(descending, links.first_child.gather(1, node[:, None]).squeeze(1), -1)
        for _ in range(trees.max_nodes):
            is_node = (child >= 0) & (child < trees.num_nodes)
            safe = torch.where(is_node, child, 0)[:, None]
            is_found = is_node & (trees.tokens.gather(1, safe).squeeze(1) == wanted)
            differs = is_node & ~is_found
            if not bool(differs.any()):
                break
            child = torch.where(differs, links.next_sibling.gather(1, safe).squeeze(1), child)
        descending = is_found
        if not bool(descending.any()):
            break
        node = torch.where(descending, child, node)
        path[:, depth] = torch.where(descending, child, -1)
        num_accepted += descending.to(num_accepted.dtype)
    return AcceptedPaths(
        path=path,
        num_accepted=num_accepted,
        bonus_tokens=target_tokens.gather(1, node[:, None]).squeeze(1),
    )
