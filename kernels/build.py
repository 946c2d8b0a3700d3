"""What a verify pass needs to know about a batch of draft trees: depths, positions, links, ancestor masks.

Letters: B requests, N nodes, L keys (committed prefix plus tree block, padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from eyas.kernels.tree import DraftTrees


class MaskEncoding(StrEnum):
    """How an attention backend wants the ancestor mask; each backend declares the one it reads."""

    FULL = "full"  # bool [B, N, L]: prefix columns and tree columns
    TREE_ONLY = "tree_only"  # bool [B, N, N]
    PACKED = "packed"  # one bit per node in the narrowest unsigned integer, [B, N]


@dataclass(frozen=True, slots=True)
class TreeLinks:
    """First-child / next-sibling form, `-1` where there is none; both int64 `[B, N]`."""

    first_child: Tensor
    next_sibling: Tensor


def node_depths(trees: DraftTrees) -> Tensor:
    """Depth of every node, the root's being 0, int64 `[B, N]`; padding gets 0."""
    depths = torch.zeros_like(trees.parents)
    current = trees.parents
    while bool((current >= 0).any()):
        depths += (current >= 0).to(depths.dtype)
        current = torch.where(current >= 0, trees.parents.gather(1, current.clamp(min=0)), current)
    return depths


def node_positions(depths: Tensor, committed_lengths: Tensor) -> Tensor:
    """Text position (and RoPE position) of every node: committed length + depth, `[B, N]`. Siblings share it."""
    return committed_lengths[:, None] + depths


def ancestor_mask(trees: DraftTrees) -> Tensor:
    """TREE_ONLY mask, bool `[B, N, N]`: row i is True at i and at i's ancestors. Padding rows see themselves only."""
    batch, num_nodes = trees.parents.shape
    device = trees.parents.device
    mask = torch.eye(num_nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    columns = torch.arange(num_nodes, device=device)
    current = trees.parents
    while bool((current >= 0).any()):
        mask |= (columns == current[:, :, None]) & (current >= 0)[:, :, None]
        current = torch.where(current >= 0, trees.parents.gather(1, current.clamp(min=0)), current)
    return mask


def full_mask(tree_mask: Tensor, committed_lengths: Tensor, num_nodes: Tensor) -> Tensor:
    """FULL mask, bool `[B, N, L]` with L = max(committed + nodes): the whole prefix, then the ancestors.

    Padding rows see the root's columns, never an empty row (softmax of nothing is NaN).
    """
    batch, max_nodes, _ = tree_mask.shape
    max_keys = int((committed_lengths + num_nodes).max())
    columns = torch.arange(max_keys, device=tree_mask.device)
    in_prefix = columns < committed_lengths[:, None]  # [B, L]
    tree_column = columns - committed_lengths[:, None]
    in_tree = (tree_column >= 0) & (tree_column < num_nodes[:, None])
    gathered = tree_mask.gather(2, tree_column.clamp(0, max_nodes - 1)[:, None, :].expand(batch, max_nodes, max_keys))
    is_padding = torch.arange(max_nodes, device=tree_mask.device) >= num_nodes[:, None]
    root_column = (tree_column == 0)[:, None, :] & is_padding[:, :, None]
    return in_prefix[:, None, :] | (in_tree[:, None, :] & gathered) | root_column


def packed_mask(tree_mask: Tensor) -> Tensor:
    """PACKED mask `[B, N]`: bit j of row i is `tree_mask[i, j]`, in uint8, uint16, uint32 or uint64.

    Raises:
        ValueError: above 64 nodes, which no integer holds.
    """
    num_nodes = tree_mask.shape[-1]
    dtypes = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}
    width = next((bits for bits in dtypes if num_nodes <= bits), None)
    if width is None:
        raise ValueError(f"a packed mask holds at most 64 nodes, got {num_nodes}; use the tree_only encoding")
    bits = torch.arange(num_nodes, device=tree_mask.device)
    words = (tree_mask.to(torch.int64) << bits).sum(dim=-1)  # bit 63 makes it negative; the cast below reinterprets
    return words.to(dtypes[width])


def unpack_mask(packed: Tensor, num_nodes: int) -> Tensor:
    """Inverse of `packed_mask`, bool `[B, N, N]`."""
    bits = torch.arange(num_nodes, device=packed.device)
    return ((packed.to(torch.int64)[..., None] >> bits) & 1).to(torch.bool)


def tree_links(trees: DraftTrees) -> TreeLinks:
    """First-child and next-sibling links of every tree; children are linked in node order."""
    parents = trees.parents
    num_nodes = trees.max_nodes
    nodes = torch.arange(num_nodes, device=parents.device)
    is_child = parents[:, :, None] == nodes  # [B, child, parent]
    is_child &= (parents >= 0)[:, :, None]
    first_child = torch.where(is_child, nodes[:, None], num_nodes).amin(dim=1)
    later_sibling = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, :, None]
    later_sibling &= nodes > nodes[:, None]  # [B, node, sibling]
    next_sibling = torch.where(later_sibling, nodes, num_nodes).amin(dim=2)
    none = torch.full_like(first_child, -1)
    return TreeLinks(
        first_child=torch.where(first_child < num_nodes, first_child, none),
        next_sibling=torch.where(next_sibling < num_nodes, next_sibling, none),
    )
