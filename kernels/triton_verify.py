# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.verify.verify_walk` as one Triton kernel: one program walks one request's tree.

    node = root
    repeat draft depth times: node = the child of node whose token is target_tokens[node], or stop

The outer loop runs over path entries, of which there are A, and the scan of siblings over nodes, of which there are N;
both bounds hold whatever the links contain. The host reads nothing back.

Letters: B requests, N nodes, A = draft depth + 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.build import TreeLinks
from eyas.kernels.launch_checks import check_layout
from eyas.kernels.tree import DraftTrees
from eyas.kernels.verify import AcceptedPaths


@triton.jit
def _verify_kernel(
    tokens_ptr,
    num_nodes_ptr,
    first_child_ptr,
    next_sibling_ptr,
    target_tokens_ptr,
    path_ptr,
    num_accepted_ptr,
    bonus_tokens_ptr,
    max_nodes,
    path_length,
):
    request = tl.program_id(0).to(tl.int64)
    row = request * max_nodes
    count = tl.load(num_nodes_ptr + request)
    path_ptr += request * path_length
    node = tl.zeros((), tl.int64)
    num_accepted = tl.zeros((), tl.int64)
    is_walking = count > 0
    wanted = tl.load(target_tokens_ptr + row)
    tl.store(path_ptr, node)
    for depth in range(1, path_length):
        child = tl.load(first_child_ptr + row + node, mask=is_walking, other=-1)
        found = tl.full((), -1, tl.int64)
        num_scanned = 0
        while (child >= 0) & (child < count) & (num_scanned < max_nodes):
            is_wanted = tl.load(tokens_ptr + row + child) == wanted
            found = tl.where(is_wanted, child, found)
            child = tl.load(next_sibling_ptr + row + child, mask=is_wanted == 0, other=-1)
            num_scanned += 1
        is_walking = found >= 0
        node = tl.where(is_walking, found, node)
        num_accepted += tl.where(is_walking, 1, 0)
        wanted = tl.load(target_tokens_ptr + row + node)
        tl.store(path_ptr + depth, found)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(bonus_tokens_ptr + request, wanted)


def verify_walk(trees: DraftTrees, links: TreeLinks, target_tokens: Tensor, draft_depth: int) -> AcceptedPaths:
    """See `kernels.verify.verify_walk`, with the same arguments and results. Never waits for the device.

    Raises:
        ValueError: for a negative draft depth, and when a tensor is not contiguous int64 of the documented shape.
    """
    if draft_depth < 0:
        raise ValueError(f"draft_depth: expected at least 0, got {draft_depth}")
    batch, max_nodes, device = trees.batch_size, trees.max_nodes, trees.tokens.device
    check_layout("tokens", trees.tokens, (batch, max_nodes), torch.int64, device)
    check_layout("num_nodes", trees.num_nodes, (batch,), torch.int64, device)
    check_layout("first_child", links.first_child, (batch, max_nodes), torch.int64, device)
    check_layout("next_sibling", links.next_sibling, (batch, max_nodes), torch.int64, device)
    check_layout("target_tokens", target_tokens, (batch, max_nodes), torch.int64, device)
    accepted = AcceptedPaths(
        path=torch.empty(batch, draft_depth + 1, dtype=torch.int64, device=device),
        num_accepted=torch.empty(batch, dtype=torch.int64, device=device),
        bonus_tokens=torch.empty(batch, dtype=torch.int64, device=device),
    )
    if batch > 0:
        _verify_kernel[(batch,)](
            trees.tokens,
            trees.num_nodes,
            links.first_child,
            links.next_sibling,
            target_tokens,
            accepted.path,
            accepted.num_accepted,
            accepted.bonus_tokens,
            max_nodes,
            draft_depth + 1,
            num_warps=1,
        )
    return accepted


def _aot_case(max_nodes: int, path_length: int) -> AotCase:
    links = ("first_child", "next_sibling", "target_tokens")
    pointers = ("tokens", "num_nodes", *links, "path", "num_accepted", "bonus_tokens")
    ones = {name: 1 for name, size in (("max_nodes", max_nodes), ("path_length", path_length)) if size == 1}
    return AotCase(
        kernel=_verify_kernel,
        signature={f"{name}_ptr": "*i64" for name in pointers}
        | {name: "i32" for name in ("max_nodes", "path_length") if name not in ones},
        constexprs={**ones},
        num_warps=1,
        label=f"N={max_nodes} A={path_length}",
    )


# Triton compiles integers of 1 in.
AOT = [_aot_case(max_nodes, path_length) for max_nodes, path_length in ((1, 1), (1, 6), (8, 1), (8, 6))]
