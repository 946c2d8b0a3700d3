# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.build.build_layout` as one Triton kernel: one program lays out one request's tree, whatever its size.

A program first proves that its row is a tree; `parents[i] < i` then bounds every climb towards the root. It goes over
the nodes in blocks and over the mask in words of 64 columns,

    bits(i, w) = OR over a in ancestors-or-self(i), a // 64 = w, of 1 << (a % 64),

which is PACKED as it stands and is spread over bytes for the other encodings. The host reads nothing back.

Letters: B requests, N nodes, L keys, W words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.build import WORD_BITS, MaskEncoding, TreeLayout, TreeLinks, check_max_keys, packed_words
from eyas.kernels.launch_checks import check_layout
from eyas.kernels.tree import PADDING_PARENT, ROOT_PARENT

MAX_BLOCK = 64  # nodes handled at once; a tile of their links, or of a word's columns, still fits the registers
PREFIX_BLOCK = 1024

_ROOT: tl.constexpr = tl.constexpr(ROOT_PARENT)
_PADDING: tl.constexpr = tl.constexpr(PADDING_PARENT)
_WORD_BITS: tl.constexpr = tl.constexpr(WORD_BITS)
_NO_MATCH: tl.constexpr = tl.constexpr(-3)  # no node's parent
_TREE_ONLY: tl.constexpr = tl.constexpr(MaskEncoding.TREE_ONLY.value)
_PACKED: tl.constexpr = tl.constexpr(MaskEncoding.PACKED.value)
_FULL: tl.constexpr = tl.constexpr(MaskEncoding.FULL.value)


@triton.jit
def _checked_count(parents_ptr, count, num_nodes, BLOCK: tl.constexpr):
    """The row's number of nodes and 1 if its parents describe a tree, else 0 and 0."""
    num_faults = tl.where((count < 0) | (count > num_nodes), 1, 0)
    for first in range(0, num_nodes, BLOCK):
        nodes = first + tl.arange(0, BLOCK)
        parents = tl.load(parents_ptr + nodes, mask=nodes < num_nodes, other=_PADDING)
        is_earlier = tl.where(nodes > 0, (parents >= 0) & (parents < nodes), parents == _ROOT)
        is_right = tl.where(nodes < count, is_earlier, parents == _PADDING)
        num_faults += tl.sum(tl.where(is_right, 0, 1))
    return tl.where(num_faults == 0, count, 0), tl.where(num_faults == 0, 1, 0)


@triton.jit
def _climb(parents_ptr, rows, count, word):
    """Depth of every row, and its ancestors among the nodes of one word. Rows from `count` on see themselves only."""
    current = rows.to(tl.int64)
    depths = tl.zeros_like(current)
    one = tl.full(current.shape, 1, tl.int64)
    bits = tl.zeros_like(current)
    # Every parent is smaller than its child, so this ends at the root after at most `count` rounds.
    while tl.max(current, axis=0) >= 0:
        bits |= tl.where((current >= 0) & (current // _WORD_BITS == word), one << (current & (_WORD_BITS - 1)), 0)
        current = tl.load(parents_ptr + current, mask=(current >= 0) & (rows < count), other=_ROOT)
        depths += tl.where(current >= 0, 1, 0)
    return depths, bits


@triton.jit
def _links(parents_ptr, rows, first_row, count, num_nodes, BLOCK: tl.constexpr):
    """First child and next sibling of every row, `num_nodes` where there is none; both stand after the row itself."""
    own_parents = tl.load(parents_ptr + rows, mask=rows < count, other=_NO_MATCH).to(tl.int32)[:, None]
    first_child = tl.full(rows.shape, num_nodes, tl.int32)
    next_sibling = tl.full(rows.shape, num_nodes, tl.int32)
    for first in range(first_row, num_nodes, BLOCK):
        later = first + tl.arange(0, BLOCK)
        parents = tl.load(parents_ptr + later, mask=later < count, other=_PADDING).to(tl.int32)[None, :]
        columns = tl.broadcast_to(later[None, :], (BLOCK, BLOCK))
        child = tl.where(parents == rows[:, None], columns, num_nodes)
        sibling = tl.where((parents == own_parents) & (columns > rows[:, None]), columns, num_nodes)
        first_child = tl.minimum(first_child, tl.min(child, axis=1))
        next_sibling = tl.minimum(next_sibling, tl.min(sibling, axis=1))
    return first_child, next_sibling


@triton.jit
def _store_prefix(mask_ptr, committed, num_nodes, num_keys, BLOCK: tl.constexpr):
    """Every column of a FULL mask that no node's key stands in."""
    for _ in range(0, num_nodes):
        for first in range(0, num_keys, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            in_block = (columns >= committed) & (columns < committed + num_nodes)
            tl.store(mask_ptr + columns, columns < committed, mask=(columns < num_keys) & (in_block == 0))
        mask_ptr += num_keys


@triton.jit
def _build_kernel(
    parents_ptr,
    num_nodes_ptr,
    committed_ptr,
    positions_ptr,
    mask_ptr,
    first_child_ptr,
    next_sibling_ptr,
    is_tree_ptr,
    num_nodes,
    num_words,
    num_keys,
    ENCODING: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    parents_ptr += request * num_nodes
    committed = tl.load(committed_ptr + request)
    count, is_tree = _checked_count(parents_ptr, tl.load(num_nodes_ptr + request), num_nodes, BLOCK)
    tl.store(is_tree_ptr + request, is_tree != 0)
    if ENCODING == _FULL:
        mask_ptr += request * num_nodes * num_keys
        _store_prefix(mask_ptr, committed, num_nodes, num_keys, PREFIX_BLOCK)
    for first_row in range(0, num_nodes, BLOCK):
        rows = first_row + tl.arange(0, BLOCK)
        is_row = rows < num_nodes
        nodes = request * num_nodes + rows
        first_child, next_sibling = _links(parents_ptr, rows, first_row, count, num_nodes, BLOCK)
        tl.store(first_child_ptr + nodes, tl.where(first_child < num_nodes, first_child, -1), mask=is_row)
        tl.store(next_sibling_ptr + nodes, tl.where(next_sibling < num_nodes, next_sibling, -1), mask=is_row)
        for word in range(0, num_words):
            depths, bits = _climb(parents_ptr, rows, count, word)
            if word == 0:
                tl.store(positions_ptr + nodes, committed + depths, mask=is_row)
            if ENCODING == _PACKED:
                words = bits.to(mask_ptr.dtype.element_ty)
                tl.store(mask_ptr + nodes * num_words + word, words, mask=is_row)
            else:
                bit = tl.arange(0, _WORD_BITS)
                columns = word * _WORD_BITS + bit
                is_seen = ((bits[:, None] >> bit[None, :]) & 1) != 0
                is_cell = is_row[:, None] & (columns < num_nodes)[None, :]
                if ENCODING == _TREE_ONLY:
                    tl.store(mask_ptr + nodes[:, None] * num_nodes + columns[None, :], is_seen, mask=is_cell)
                else:
                    keys = committed + columns
                    is_seen = tl.where((rows < count)[:, None], is_seen, (columns == 0)[None, :])
                    offsets = rows.to(tl.int64)[:, None] * num_keys + keys[None, :]
                    tl.store(mask_ptr + offsets, is_seen, mask=is_cell & (keys < num_keys)[None, :])


def build_layout(
    parents: Tensor,
    num_nodes: Tensor,
    committed_lengths: Tensor,
    encoding: MaskEncoding,
    max_keys: int | None = None,
) -> TreeLayout:
    """See `kernels.build.build_layout`, with the same arguments and results. Never waits for the device.

    Raises:
        ValueError: when a tensor is not contiguous int64 of the documented shape, and as the reference does.
    """
    check_max_keys(encoding, max_keys)
    if parents.ndim != 2 or parents.shape[1] < 1:
        raise ValueError(f"parents: expected [B, N] with at least one node, got {list(parents.shape)}")
    batch, nodes = parents.shape
    device = parents.device
    check_layout("parents", parents, (batch, nodes), torch.int64, device)
    check_layout("num_nodes", num_nodes, (batch,), torch.int64, device)
    check_layout("committed_lengths", committed_lengths, (batch,), torch.int64, device)
    num_words, word_dtype = packed_words(nodes)
    num_keys = max_keys or 0
    if encoding is MaskEncoding.FULL:
        mask = torch.empty(batch, nodes, num_keys, dtype=torch.bool, device=device)
    elif encoding is MaskEncoding.TREE_ONLY:
        mask = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=device)
    else:
        mask = torch.empty(batch, nodes, num_words, dtype=word_dtype, device=device)
    layout = TreeLayout(
        positions=torch.empty_like(parents),
        mask=mask,
        links=TreeLinks(torch.empty_like(parents), torch.empty_like(parents)),
        is_tree=torch.empty(batch, dtype=torch.bool, device=device),
    )
    if batch == 0:
        return layout
    block, num_warps = _launch_shape(nodes)
    _build_kernel[(batch,)](
        parents,
        num_nodes,
        committed_lengths,
        layout.positions,
        layout.mask,
        layout.links.first_child,
        layout.links.next_sibling,
        layout.is_tree,
        nodes,
        num_words,
        num_keys,
        ENCODING=encoding.value,
        BLOCK=block,
        PREFIX_BLOCK=PREFIX_BLOCK,
        num_warps=num_warps,
    )
    return layout


def _launch_shape(nodes: int) -> tuple[int, int]:
    """Nodes per block and warps per program."""
    block = min(max(16, triton.next_power_of_2(nodes)), MAX_BLOCK)
    return block, block // 8 if block > 16 else 1


def _aot_case(encoding: MaskEncoding, nodes: int) -> AotCase:
    block, num_warps = _launch_shape(nodes)
    num_words, dtype = packed_words(nodes)
    word = str(dtype).removeprefix("torch.uint")
    indices = ("parents", "num_nodes", "committed", "positions", "first_child", "next_sibling")
    ones = {name: 1 for name, size in (("num_nodes", nodes), ("num_words", num_words)) if size == 1}
    return AotCase(
        kernel=_build_kernel,
        signature={f"{name}_ptr": "*i64" for name in indices}
        | {"mask_ptr": f"*u{word}" if encoding is MaskEncoding.PACKED else "*u1", "is_tree_ptr": "*u1"}
        | {name: "i32" for name in ("num_nodes", "num_words", "num_keys") if name not in ones},
        constexprs={**ones, "ENCODING": encoding.value, "BLOCK": block, "PREFIX_BLOCK": PREFIX_BLOCK},
        num_warps=num_warps,
        label=f"{encoding} N={nodes}",
    )


# Triton compiles integers of 1 in.
AOT = [_aot_case(encoding, nodes) for encoding in MaskEncoding for nodes in (1, 8, 32, 128)]
