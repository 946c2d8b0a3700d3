"""What a verify pass needs to know about a batch of draft trees: depths, positions, links, ancestor masks.

The encodings of the mask differ in the bytes a step writes. For B requests of N nodes over prefixes of P tokens, and at
256 requests of 8 nodes over 32768 tokens:

    FULL       B * N * (P + N)              67 MB
    TREE_ONLY  B * N * N                    16 KB
    PACKED     B * N * W * (1, 2, 4 or 8)    2 KB

Only FULL grows with the context, and it is written only for a backend that declares it.

Letters: B requests, N nodes, L keys (committed prefix plus tree block, padded), W words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from eyas.kernels.tree import PADDING_PARENT, ROOT_PARENT, DraftTrees

WORD_BITS = 64


class MaskEncoding(StrEnum):
    """How an attention backend wants the ancestor mask; each backend declares the one it reads."""

    FULL = "full"  # bool [B, N, L]: prefix columns and tree columns
    TREE_ONLY = "tree_only"  # bool [B, N, N]
    PACKED = "packed"  # one bit per node in the narrowest unsigned integer, [B, N, W]


@dataclass(frozen=True, slots=True)
class TreeLinks:
    """First-child / next-sibling form, `-1` where there is none; both int64 `[B, N]`."""

    first_child: Tensor
    next_sibling: Tensor


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A batch of trees as a verify pass reads it.

    Args:
        positions: text position of every node, that of the root in padding, int64 `[B, N]`.
        mask: ancestors of every node in the encoding asked for; see `MaskEncoding`.
        links: children of every node.
        is_tree: bool `[B]`; False where a row's parents describe no tree. Such a row is laid out as padding.
    """

    positions: Tensor
    mask: Tensor
    links: TreeLinks
    is_tree: Tensor


def build_layout(
    parents: Tensor,
    num_nodes: Tensor,
    committed_lengths: Tensor,
    encoding: MaskEncoding,
    max_keys: int | None = None,
) -> TreeLayout:
    """Lay out a batch of trees that nobody has validated on the host.

    A row is a tree when node 0 has parent -1, every further node an earlier one, and padding -2. A missing or later
    parent is refused through `is_tree`, never treated as the root.

    Args:
        parents: as in `DraftTrees`, int64 `[B, N]`.
        num_nodes: int64 `[B]`; 0 makes a padding request.
        committed_lengths: int64 `[B]`.
        max_keys: columns of a FULL mask, at least committed length + nodes of every request; only FULL takes it.

    Raises:
        ValueError: when `max_keys` is missing for FULL or given for another encoding.
    """
    check_max_keys(encoding, max_keys)
    nodes = torch.arange(parents.shape[1], device=parents.device)
    is_real = nodes < num_nodes[:, None]
    is_earlier = torch.where(nodes > 0, (parents >= 0) & (parents < nodes), parents == ROOT_PARENT)
    is_tree = torch.where(is_real, is_earlier, parents == PADDING_PARENT).all(dim=1)
    is_tree &= (num_nodes >= 0) & (num_nodes <= parents.shape[1])
    trees = DraftTrees(
        tokens=torch.zeros_like(parents),
        parents=torch.where(is_tree[:, None], parents, PADDING_PARENT),
        num_nodes=torch.where(is_tree, num_nodes, 0),
    )
    mask = ancestor_mask(trees)
    if encoding is MaskEncoding.FULL:
        mask = full_mask(mask, committed_lengths, trees.num_nodes, max_keys)
    elif encoding is MaskEncoding.PACKED:
        mask = packed_mask(mask)
    positions = node_positions(node_depths(trees), committed_lengths)
    return TreeLayout(positions, mask, tree_links(trees), is_tree)


def check_max_keys(encoding: MaskEncoding, max_keys: int | None) -> None:
    """Raise `ValueError` unless a number of columns is given for FULL, and for FULL alone."""
    if (encoding is MaskEncoding.FULL) != (max_keys is not None):
        raise ValueError(f"a {encoding} mask {'needs' if max_keys is None else 'has no'} max_keys, got {max_keys}")


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


def full_mask(tree_mask: Tensor, committed_lengths: Tensor, num_nodes: Tensor, max_keys: int | None = None) -> Tensor:
    """FULL mask, bool `[B, N, L]` with L = max_keys: the whole prefix, then the ancestors.

    Padding rows see the root's columns, never an empty row (softmax of nothing is NaN).

    Args:
        max_keys: None means the most that any request has, committed + nodes.
    """
    batch, max_nodes, _ = tree_mask.shape
    if max_keys is None:
        max_keys = int((committed_lengths + num_nodes).max())
    columns = torch.arange(max_keys, device=tree_mask.device)
    in_prefix = columns < committed_lengths[:, None]  # [B, L]
    tree_column = columns - committed_lengths[:, None]
    in_tree = (tree_column >= 0) & (tree_column < num_nodes[:, None])
    gathered = tree_mask.gather(2, tree_column.clamp(0, max_nodes - 1)[:, None, :].expand(batch, max_nodes, max_keys))
    is_padding = torch.arange(max_nodes, device=tree_mask.device) >= num_nodes[:, None]
    root_column = (tree_column == 0)[:, None, :] & is_padding[:, :, None]
    return in_prefix[:, None, :] | (in_tree[:, None, :] & gathered) | root_column


def packed_words(num_nodes: int) -> tuple[int, torch.dtype]:
    """Words per row of a PACKED mask and their type: one word of the narrowest type up to 64 nodes, then of 64 bits."""
    dtypes = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
    narrow = next((dtype for bits, dtype in dtypes.items() if num_nodes <= bits), torch.uint64)
    return max(1, -(-num_nodes // WORD_BITS)), narrow


def packed_mask(tree_mask: Tensor) -> Tensor:
    """PACKED mask `[B, N, W]`: bit j % 64 of word j // 64 of row i is `tree_mask[i, j]`; see `packed_words`."""
    num_nodes = tree_mask.shape[-1]
    num_words, dtype = packed_words(num_nodes)
    bits = torch.nn.functional.pad(tree_mask.to(torch.int64), (0, num_words * WORD_BITS - num_nodes))
    words = bits.view(*bits.shape[:-1], num_words, WORD_BITS) << torch.arange(WORD_BITS, device=tree_mask.device)
    return words.sum(dim=-1).to(dtype)  # bit 63 makes a sum negative; the cast reinterprets it


def unpack_mask(packed: Tensor, num_nodes: int) -> Tensor:
    """Inverse of `packed_mask`, bool `[B, N, N]`."""
    bits = torch.arange(WORD_BITS, device=packed.device)
    return ((packed.to(torch.int64)[..., None] >> bits) & 1).to(torch.bool).flatten(-2)[..., :num_nodes]


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
