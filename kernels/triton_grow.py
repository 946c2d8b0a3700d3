# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.grow.expand_level` as one Triton kernel: one program per request scores and ranks a level's candidates.

The C = W * W candidates are ranked by counting,

    rank(i) = #{j : score(j) > score(i)} + #{j < i : score(j) = score(i)},

which is the place a stable descending sort would give; ranks below W survive. `OPERATIONS` makes `TreeGrowth` use this
and the selection of `kernels.triton_select`.

Letters: B requests, W width, C candidates of a level.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.grow import Frontier, GrownLevel, GrowOperations
from eyas.kernels.launch_checks import check_layout
from eyas.kernels.triton_select import select_within

MAX_WIDTH = 32
LOG_PROB_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def _expand_kernel(
    parent_scores_ptr,
    parent_indices_ptr,
    tokens_ptr,
    log_probs_ptr,
    scores_ptr,
    parents_ptr,
    best_tokens_ptr,
    best_scores_ptr,
    best_ranks_ptr,
    best_indices_ptr,
    first_index,
    width,
    tokens_stride_b,
    tokens_stride_r,
    tokens_stride_c,
    log_probs_stride_b,
    log_probs_stride_r,
    log_probs_stride_c,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    num_candidates = width * width
    own = tl.arange(0, BLOCK)
    is_own = own < num_candidates
    survivors, children = own // width, own % width
    log_probs_ptr += request * log_probs_stride_b
    offsets = survivors.to(tl.int64) * log_probs_stride_r + children * log_probs_stride_c
    edges = tl.load(log_probs_ptr + offsets, mask=is_own, other=0.0).to(tl.float32)
    edges = tl.where(edges != edges, -float("inf"), tl.minimum(edges, 0.0))
    parent_scores = tl.load(parent_scores_ptr + request * width + survivors, mask=is_own, other=0.0)
    scores = parent_scores + edges
    level = request * num_candidates
    tl.store(scores_ptr + level + own, scores, mask=is_own)
    parents = tl.load(parent_indices_ptr + request * width + survivors, mask=is_own, other=0)
    tl.store(parents_ptr + level + own, parents, mask=is_own)
    tl.debug_barrier()  # every thread counts over the scores that all of them have stored
    ranks = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_candidates, CHUNK):
        others = first + tl.arange(0, CHUNK)
        is_other = (others < num_candidates)[None, :]
        other_scores = tl.load(scores_ptr + level + others, mask=others < num_candidates, other=0.0)[None, :]
        is_equal = (other_scores == scores[:, None]) & (others[None, :] < own[:, None])
        ranks += tl.sum(tl.where(is_other & ((other_scores > scores[:, None]) | is_equal), 1, 0), axis=1)
    is_kept = is_own & (ranks < width)
    tokens_ptr += request * tokens_stride_b
    offsets = survivors.to(tl.int64) * tokens_stride_r + children * tokens_stride_c
    tokens = tl.load(tokens_ptr + offsets, mask=is_kept, other=0)
    places = request * width + ranks
    tl.store(best_tokens_ptr + places, tokens, mask=is_kept)
    tl.store(best_scores_ptr + places, scores, mask=is_kept)
    tl.store(best_ranks_ptr + places, survivors.to(tl.int64), mask=is_kept)
    tl.store(best_indices_ptr + places, own.to(tl.int64) + first_index, mask=is_kept)


def expand_level(frontier: Frontier, tokens: Tensor, log_probs: Tensor, first_index: int) -> GrownLevel:
    """See `kernels.grow.expand_level`, with the same arguments and results; candidates may have any strides.

    Raises:
        ValueError: for a width above `MAX_WIDTH`, log-probabilities in another dtype than `LOG_PROB_DTYPES`, and
            tensors that are not of the documented shape and type.
    """
    batch, width = frontier.tokens.shape
    device = frontier.tokens.device
    if width > MAX_WIDTH:
        raise ValueError(f"width: expected at most {MAX_WIDTH}, got {width}")
    scores = frontier.scores.contiguous()
    pool_indices = frontier.pool_indices.contiguous()  # expanded over the batch after the first level
    check_layout("scores", scores, (batch, width), torch.float32, device)
    check_layout("pool_indices", pool_indices, (batch, width), torch.int64, device)
    shape = (batch, width, width)
    if tuple(tokens.shape) != shape or tokens.dtype != torch.int64 or tokens.device != device:
        raise ValueError(f"tokens: expected int64 {list(shape)} on {device}, got {tokens.dtype} {list(tokens.shape)}")
    if tuple(log_probs.shape) != shape or log_probs.dtype not in LOG_PROB_DTYPES or log_probs.device != device:
        raise ValueError(
            f"log_probs: expected {list(shape)} on {device} in {list(LOG_PROB_DTYPES)}, "
            f"got {log_probs.dtype} {list(log_probs.shape)}"
        )
    level = GrownLevel(
        scores=torch.empty(batch, width * width, dtype=torch.float32, device=device),
        parents=torch.empty(batch, width * width, dtype=torch.int64, device=device),
        frontier=Frontier(
            tokens=torch.empty(batch, width, dtype=torch.int64, device=device),
            scores=torch.empty(batch, width, dtype=torch.float32, device=device),
            parent_ranks=torch.empty(batch, width, dtype=torch.int64, device=device),
            pool_indices=torch.empty(batch, width, dtype=torch.int64, device=device),
        ),
    )
    if batch == 0:
        return level
    block, chunk, num_warps = _launch_shape(width)
    _expand_kernel[(batch,)](
        scores,
        pool_indices,
        tokens,
        log_probs,
        level.scores,
        level.parents,
        level.frontier.tokens,
        level.frontier.scores,
        level.frontier.parent_ranks,
        level.frontier.pool_indices,
        first_index,
        width,
        *tokens.stride(),
        *log_probs.stride(),
        BLOCK=block,
        CHUNK=chunk,
        num_warps=num_warps,
    )
    return level


def _launch_shape(width: int) -> tuple[int, int, int]:
    """Candidates per program, candidates compared at once, and warps."""
    block = max(16, triton.next_power_of_2(width * width))
    return block, min(16, block), max(1, min(block // 64, 8))


def _aot_case(dtype: str, width: int) -> AotCase:
    block, chunk, num_warps = _launch_shape(width)
    indices = ("parent_indices", "tokens", "parents", "best_tokens", "best_ranks", "best_indices")
    scores = ("parent_scores", "scores", "best_scores")
    strides = tuple(f"{name}_stride_{dim}" for name in ("tokens", "log_probs") for dim in "brc")
    integers = ("first_index", "width", *strides)
    ones = ("width", *strides) if width == 1 else (strides[2], strides[5])
    return AotCase(
        kernel=_expand_kernel,
        signature={f"{name}_ptr": "*i64" for name in indices}
        | {f"{name}_ptr": "*fp32" for name in scores}
        | {"log_probs_ptr": f"*{dtype}"}
        | {name: "i32" for name in integers if name not in ones},
        constexprs={**dict.fromkeys(ones, 1), "BLOCK": block, "CHUNK": chunk},
        num_warps=num_warps,
        label=f"{dtype} W={width}",
    )


# Triton compiles integers of 1 in.
AOT = [_aot_case(dtype, width) for dtype in LOG_PROB_DTYPES.values() for width in (1, 8, 10, 32)]
OPERATIONS = GrowOperations(expand_level, select_within)
