# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.selection.select_within` as one Triton kernel: one program chooses and renumbers one request's nodes.

The K best of a pool need no sorting. The K-th best score is found bit by bit, as the largest t that at least K scores
reach, where scores are compared as unsigned integers of the same order. Those above t are kept, and of those equal to t
the first ones, as a stable sort would. The count of kept candidates up to each is its node, so parents, which must be
kept ones of lower index, are renumbered by one look-up. 32 passes over the pool take the place of P * P comparisons.

Letters: B requests, P pooled candidates, K kept ones, N nodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.launch_checks import check_layout
from eyas.kernels.selection import SelectedTrees, check_max_nodes
from eyas.kernels.tree import PADDING_PARENT, ROOT_PARENT, DraftTrees

MAX_POOLED = 4096

_ROOT: tl.constexpr = tl.constexpr(ROOT_PARENT)
_PADDING: tl.constexpr = tl.constexpr(PADDING_PARENT)


@triton.jit
def _ordered_bits(scores):
    """Unsigned integers in the order of the scores, both zeros being equal and NaN lowest, all of them above 0."""
    scores = tl.where(scores != scores, -float("inf"), tl.where(scores == 0.0, 0.0, scores))
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _best(keys, num_kept):
    """1 at each of the `num_kept` largest keys, the earlier first among equal ones, else 0; keys of 0 never count."""
    threshold = tl.zeros((), tl.uint32)
    for step in range(32):
        trial = threshold | (tl.full((), 0x80000000, tl.uint32) >> step)
        num_reaching = tl.sum(tl.where(keys >= trial, 1, 0), axis=0)
        threshold = tl.where(num_reaching >= num_kept, trial, threshold)
    is_above = tl.where(keys > threshold, 1, 0)
    is_equal = tl.where(keys == threshold, 1, 0)
    num_missing = num_kept - tl.sum(is_above, axis=0)
    return is_above | tl.where(tl.cumsum(is_equal, axis=0) <= num_missing, is_equal, 0)


@triton.jit
def _select_kernel(
    root_tokens_ptr,
    tokens_ptr,
    parents_ptr,
    scores_ptr,
    budgets_ptr,
    tree_tokens_ptr,
    tree_parents_ptr,
    num_nodes_ptr,
    is_closed_ptr,
    pooled,
    max_nodes,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    budget = tl.minimum(tl.load(budgets_ptr + request), tl.minimum(pooled + 1, max_nodes)).to(tl.int32)
    candidates = tl.arange(0, BLOCK)
    is_pooled = candidates < pooled
    pool = request * pooled + candidates
    scores = tl.load(scores_ptr + pool, mask=is_pooled, other=0.0)
    is_kept = _best(tl.where(is_pooled, _ordered_bits(scores), 0), tl.maximum(budget - 1, 0))
    nodes = tl.cumsum(is_kept, axis=0) * is_kept  # 0 for those not kept
    pool_parents = tl.load(parents_ptr + pool, mask=is_pooled, other=0)
    is_earlier = (pool_parents >= 1) & (pool_parents <= candidates)
    places = tl.where(is_earlier, pool_parents - 1, 0).to(tl.int32)
    parents = tl.where(is_earlier, tl.gather(nodes, places, axis=0), 0)
    is_missing = (is_kept == 1) & (pool_parents != 0) & (parents == 0)
    is_closed = tl.max(is_missing.to(tl.int32), axis=0) == 0
    count = tl.where(is_closed, budget, tl.minimum(budget, 1))
    tree = request * max_nodes
    is_node = (nodes > 0) & (nodes < count)
    tokens = tl.load(tokens_ptr + pool, mask=is_node, other=0)
    tl.store(tree_tokens_ptr + tree + nodes, tokens, mask=is_node)
    tl.store(tree_parents_ptr + tree + nodes, parents.to(tl.int64), mask=is_node)
    slots = tl.arange(0, NODES)
    is_root = (slots == 0) & (budget > 0)
    rest = tree + slots
    is_rest = is_root | ((slots < max_nodes) & (slots >= count))
    root = tl.load(root_tokens_ptr + request)
    tl.store(tree_tokens_ptr + rest, tl.where(is_root, root, 0), mask=is_rest)
    tl.store(tree_parents_ptr + rest, tl.where(is_root, _ROOT, _PADDING).to(tl.int64), mask=is_rest)
    tl.store(num_nodes_ptr + request, tl.maximum(count, 0).to(tl.int64))
    tl.store(is_closed_ptr + request, is_closed)


def select_within(
    root_tokens: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, num_nodes: Tensor, max_nodes: int
) -> SelectedTrees:
    """See `kernels.selection.select_within`, with the same arguments and results.

    Raises:
        ValueError: for more than `MAX_POOLED` candidates or `max_nodes` above that, and when a tensor is not contiguous
            or not of the documented shape and type.
    """
    check_max_nodes(max_nodes)
    if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= MAX_POOLED or max_nodes > MAX_POOLED:
        raise ValueError(
            f"tokens: expected [B, P] of 1 to {MAX_POOLED} candidates for as many nodes, "
            f"got {list(tokens.shape)} for {max_nodes}"
        )
    batch, pooled = tokens.shape
    device = tokens.device
    check_layout("root_tokens", root_tokens, (batch,), torch.int64, device)
    check_layout("tokens", tokens, (batch, pooled), torch.int64, device)
    check_layout("parents", parents, (batch, pooled), torch.int64, device)
    check_layout("scores", scores, (batch, pooled), torch.float32, device)
    check_layout("num_nodes", num_nodes, (batch,), torch.int64, device)
    trees = DraftTrees(
        tokens=torch.empty(batch, max_nodes, dtype=torch.int64, device=device),
        parents=torch.empty(batch, max_nodes, dtype=torch.int64, device=device),
        num_nodes=torch.empty_like(num_nodes),
    )
    is_closed = torch.empty(batch, dtype=torch.bool, device=device)
    if batch == 0:
        return SelectedTrees(trees, is_closed)
    block, nodes, num_warps = _launch_shape(pooled, max_nodes)
    _select_kernel[(batch,)](
        root_tokens,
        tokens,
        parents,
        scores,
        num_nodes,
        trees.tokens,
        trees.parents,
        trees.num_nodes,
        is_closed,
        pooled,
        max_nodes,
        BLOCK=block,
        NODES=nodes,
        num_warps=num_warps,
    )
    return SelectedTrees(trees, is_closed)


def _launch_shape(pooled: int, max_nodes: int) -> tuple[int, int, int]:
    """Candidates and nodes of a program, and its warps."""
    block = max(32, triton.next_power_of_2(pooled))
    return block, max(16, triton.next_power_of_2(max_nodes)), max(1, min(block // 128, 8))


def _aot_case(pooled: int, max_nodes: int) -> AotCase:
    block, nodes, num_warps = _launch_shape(pooled, max_nodes)
    indices = ("root_tokens", "tokens", "parents", "budgets", "tree_tokens", "tree_parents", "num_nodes")
    ones = {name: 1 for name, size in (("pooled", pooled), ("max_nodes", max_nodes)) if size == 1}
    return AotCase(
        kernel=_select_kernel,
        signature={f"{name}_ptr": "*i64" for name in indices}
        | {"scores_ptr": "*fp32", "is_closed_ptr": "*u1"}
        | {name: "i32" for name in ("pooled", "max_nodes") if name not in ones},
        constexprs={**ones, "BLOCK": block, "NODES": nodes},
        num_warps=num_warps,
        label=f"P={pooled} N={max_nodes}",
    )


# Triton compiles integers of 1 in.
AOT = [
    _aot_case(pooled, nodes)
    for pooled, nodes in ((1, 1), (5, 6), (76, 16), (410, 64), (710, 128), (1552, 64), (4096, 1024))
]
