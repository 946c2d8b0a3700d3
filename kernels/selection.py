"""Choosing the nodes of a draft tree from a pool of scored candidates (EAGLE-2, arXiv:2406.16858, section 4.2).

Ancestor closure holds by construction where no candidate's score exceeds its parent's and the pool is ordered by depth:
the sort is stable, so equal scores keep (depth, index) order and the ancestor comes first. Any prefix of that order is
closed. Whether it is so is checked all the same: a missing parent is never treated as the root.

Letters: B requests, P pooled candidates, K kept ones, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.tree import PADDING_PARENT, ROOT_PARENT, DraftTrees


@dataclass(frozen=True, slots=True)
class SelectedTrees:
    """Trees chosen on the device alone.

    Args:
        trees: padded to the width asked for, with 0 nodes where the budget was 0.
        is_closed: False where a kept candidate's parent was not kept before it; such a tree is cut to its root. Bool
            `[B]`.
    """

    trees: DraftTrees
    is_closed: Tensor


def select_nodes(root_tokens: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: Tensor) -> DraftTrees:
    """As `select_within`, as wide as the largest tree. Waits for the device.

    Raises:
        ValueError: if a kept candidate's parent is not an earlier kept candidate, or a budget is below 1.
    """
    most = most_nodes(num_nodes, tokens.shape[1])
    return require_closed(select_within(root_tokens, tokens, parents, scores, num_nodes, most))


def select_within(
    root_tokens: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: Tensor, max_nodes: int
) -> SelectedTrees:
    """Keep each request's best `num_nodes - 1` candidates of a pool and renumber them as a tree.

    Reads no value on the host.

    Args:
        root_tokens: int64 `[B]`.
        tokens, scores: candidates ordered by depth, int64 and float32 `[B, P]`; a score of NaN ranks last.
        parents: pool index of each candidate's parent, 0 being the root and candidate j having index j + 1, int64
            `[B, P]`.
        num_nodes: budget per request, root included, int64 `[B]`; one below 1 makes a padding request.
        max_nodes: nodes the trees are padded to; caps every budget.

    Raises:
        ValueError: if `max_nodes` is below 1.
    """
    check_max_nodes(max_nodes)
    pooled = tokens.shape[1]
    most = min(max_nodes - 1, pooled)
    num_kept = (num_nodes - 1).clamp(min=0, max=most)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
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
    is_closed = (past_budget | is_root_child | matches).all(dim=1)
    is_padding = past_budget | ~is_closed[:, None]
    node_parents = torch.where(is_root_child, 0, found + 1).masked_fill(is_padding, PADDING_PARENT)
    node_tokens = tokens.gather(1, safe).masked_fill(is_padding, 0)
    trees = DraftTrees(
        tokens=torch.cat([root_tokens.reshape(-1, 1), node_tokens], dim=1),
        parents=torch.nn.functional.pad(node_parents, (1, 0), value=ROOT_PARENT),
        num_nodes=torch.where(is_closed, num_kept + 1, 1),
    )
    return SelectedTrees(pad_selected(trees, num_nodes, max_nodes), is_closed)


def pad_selected(trees: DraftTrees, budgets: Tensor, max_nodes: int) -> DraftTrees:
    """Pad trees to `max_nodes` and empty those whose budget `[B]` is below 1."""
    missing = max_nodes - trees.max_nodes
    has_none = budgets < 1
    return DraftTrees(
        tokens=torch.nn.functional.pad(trees.tokens, (0, missing)).masked_fill(has_none[:, None], 0),
        parents=torch.nn.functional.pad(trees.parents, (0, missing), value=PADDING_PARENT).masked_fill(
            has_none[:, None], PADDING_PARENT
        ),
        num_nodes=trees.num_nodes.masked_fill(has_none, 0),
    )


def check_max_nodes(max_nodes: int) -> None:
    """Raise `ValueError` unless trees of so many nodes have room for their root."""
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1 (the root), got {max_nodes}")


def check_budgets(num_nodes: Tensor) -> None:
    """Raise `ValueError` unless every budget has room for the root. Waits for the device."""
    if int(num_nodes.min()) < 1:
        raise ValueError(f"node budget must be at least 1 (the root), got {num_nodes.tolist()}")


def most_nodes(num_nodes: Tensor, pooled: int) -> int:
    """Nodes of the largest tree that these budgets can buy from a pool; raises as `check_budgets` does."""
    check_budgets(num_nodes)
    return min(int(num_nodes.max()), pooled + 1)


def require_closed(selected: SelectedTrees) -> DraftTrees:
    """The trees; raises `ValueError` unless all are closed. Waits for the device."""
    if not bool(selected.is_closed.all()):
        raise ValueError("a kept candidate's parent was not kept before it: scores are not ancestor-closed")
    return selected.trees
