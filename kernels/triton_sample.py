# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.sample` in Triton: noise is hashed, scaled and compared in registers and never stored.

The vocabulary of a row is cut into splits. A program keeps the best score of each of its lanes,

    score(j) = logits(j) / t + gumbel(seed, position, j),

where an earlier id is only displaced by a better one, then takes the lowest id among its best lanes; a second kernel
does the same over the splits. So ties go to the lowest id however the vocabulary is cut. The hash runs in 32-bit
integers; its logarithms are float64 and rounded once, as `kernels.noise` defines them.

Letters: T rows, C columns, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.launch_checks import check_layout
from eyas.kernels.sample import MIN_TEMPERATURE, SampledTokens

BLOCK = 1024
MAX_SPLITS = 128  # of a row; the second kernel reads them at once
ENOUGH_PROGRAMS = 1024  # several for each multiprocessor of any GPU; more splits would only add to the second kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MIN_TEMPERATURE: tl.constexpr = tl.constexpr(MIN_TEMPERATURE)
_UNIT: tl.constexpr = tl.constexpr(2.0**-32)
_NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):
    """See `kernels.noise._mix_int`, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stream_key(seed, position):
    """See `kernels.noise.stream_key`."""
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    first = _mix(_mix(low ^ 0x9E3779B9) + place)
    second = _mix(_mix(high ^ 0x85EBCA6B) ^ _mix(_mix(low ^ 0xC2B2AE35) + place))
    return first, second


@triton.jit
def _perturbed(scores, ids, temperature, first, second):
    """Float32 `scores / temperature + gumbel` under the stream key (first, second)."""
    bits = _mix(_mix(ids.to(tl.uint32) ^ first) ^ second)
    uniform = (bits.to(tl.float64) + 0.5) * _UNIT
    noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
    return tl.div_rn(scores, tl.maximum(temperature, _MIN_TEMPERATURE)) + noise


@triton.jit(do_not_specialize=["blocks_per_split"])
def _best_of_split_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    best_scores_ptr,
    best_ids_ptr,
    largest_ptr,
    row_stride,
    vocab_size,
    blocks_per_split,
    BLOCK: tl.constexpr,
):
    """Best perturbed logit of one split of one row, its id, and the largest logit, where NaN counts as infinity."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    first, second = _stream_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    logits_ptr += row * row_stride
    start = split * blocks_per_split * BLOCK
    stop = tl.minimum(start + blocks_per_split * BLOCK, vocab_size)
    best_ids = start + tl.arange(0, BLOCK)
    best_scores = tl.full([BLOCK], float("-inf"), tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    while start < stop:
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(logits_ptr + ids, mask=ids < stop, other=float("-inf")).to(tl.float32)
        scores = tl.where(scores == scores, scores, float("inf"))
        largest = tl.maximum(largest, scores)
        if temperature > 0:
            scores = _perturbed(scores, ids, temperature, first, second)
        is_better = scores > best_scores
        best_scores = tl.where(is_better, scores, best_scores)
        best_ids = tl.where(is_better, ids, best_ids)
        start += BLOCK
    best_score = tl.max(best_scores, axis=0)
    place = row * tl.num_programs(1) + split
    tl.store(best_scores_ptr + place, best_score)
    tl.store(best_ids_ptr + place, tl.min(tl.where(best_scores == best_score, best_ids, _NO_ID), axis=0))
    tl.store(largest_ptr + place, tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["num_splits"])
def _best_of_row_kernel(
    best_scores_ptr, best_ids_ptr, largest_ptr, tokens_ptr, is_finite_ptr, num_splits, MAX_SPLITS: tl.constexpr
):
    """The best of one row's splits; split order is id order."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    places, is_split = row * num_splits + splits, splits < num_splits
    scores = tl.load(best_scores_ptr + places, mask=is_split, other=float("-inf"))
    ids = tl.load(best_ids_ptr + places, mask=is_split, other=_NO_ID)
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, _NO_ID), axis=0)
    largest = tl.max(tl.load(largest_ptr + places, mask=is_split, other=float("-inf")), axis=0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(is_finite_ptr + row, tl.abs(largest) < float("inf"))


@triton.jit
def _perturb_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    token_ids_ptr,
    out_ptr,
    row_stride,
    id_row_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    temperature = tl.load(temperatures_ptr + row)
    scores = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if temperature > 0:
        first, second = _stream_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        ids = tl.load(token_ids_ptr + row * id_row_stride + columns, mask=is_column, other=0)
        scores = _perturbed(scores, ids, temperature, first, second)
    tl.store(out_ptr + row * num_columns + columns, scores, mask=is_column)


def sample_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> SampledTokens:
    """See `kernels.sample.sample_tokens`.

    Raises:
        ValueError: for a layout that the kernels do not read; see `perturb`.
    """
    rows, vocab_size = _check_rows(logits, temperatures, seeds, positions)
    if vocab_size < 1:
        raise ValueError("logits: expected at least one column")
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    is_finite = torch.empty(rows, dtype=torch.bool, device=device)
    if rows:
        num_blocks = triton.cdiv(vocab_size, BLOCK)
        wanted = min(MAX_SPLITS, max(1, ENOUGH_PROGRAMS // rows))
        blocks_per_split = triton.cdiv(num_blocks, wanted)
        num_splits = triton.cdiv(num_blocks, blocks_per_split)
        # Not two halves of one tensor: the second might not begin at 16 bytes, for which kernels are compiled anew.
        best_scores, largest = (torch.empty(rows, num_splits, device=device) for _ in range(2))
        best_ids = torch.empty(rows, num_splits, dtype=torch.int32, device=device)
        _best_of_split_kernel[(rows, num_splits)](
            logits, temperatures, seeds, positions, best_scores, best_ids, largest, logits.stride(0), vocab_size,
            blocks_per_split, BLOCK=BLOCK,
        )  # fmt: skip
        _best_of_row_kernel[(rows,)](
            best_scores, best_ids, largest, tokens, is_finite, num_splits, MAX_SPLITS=MAX_SPLITS, num_warps=1
        )
    return SampledTokens(tokens=tokens, is_finite=is_finite)


def perturb(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """See `kernels.sample.perturb`.

    Raises:
        ValueError: unless logits are float32, bfloat16 or float16 and the ids int64, both with adjacent columns, and
            the other tensors contiguous.
    """
    rows, columns = _check_rows(logits, temperatures, seeds, positions)
    expected = (columns,) if token_ids.ndim == 1 else (rows, columns)
    if tuple(token_ids.shape) != expected or token_ids.dtype != torch.int64 or token_ids.device != logits.device:
        raise ValueError(
            f"token_ids: expected int64 {list(expected)} on {logits.device}, "
            f"got {token_ids.dtype} {list(token_ids.shape)} on {token_ids.device}"
        )
    _check_columns("token_ids", token_ids)
    out = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    if out.numel():
        _perturb_kernel[(rows, triton.cdiv(columns, BLOCK))](
            logits, temperatures, seeds, positions, token_ids, out, logits.stride(0),
            token_ids.stride(0) if token_ids.ndim == 2 else 0, columns, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def _check_rows(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[int, int]:
    """Rows and columns of the logits, once all tensors are what the kernels read."""
    if logits.ndim != 2 or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits: expected float32, bfloat16 or float16 [T, C], got {logits.dtype} {list(logits.shape)}"
        )
    _check_columns("logits", logits)
    rows, columns = logits.shape
    check_layout("temperatures", temperatures, (rows,), torch.float32, logits.device)
    check_layout("seeds", seeds, (rows,), torch.int64, logits.device)
    check_layout("positions", positions, (rows,), torch.int64, logits.device)
    return rows, columns


def _check_columns(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected adjacent columns, got strides {list(tensor.stride())}")


_ROW_SIGNATURE = {"temperatures_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64"}
_PARTIAL_SIGNATURE = {"best_scores_ptr": "*fp32", "best_ids_ptr": "*i32", "largest_ptr": "*fp32"}

AOT = [
    *(
        AotCase(
            kernel=_best_of_split_kernel,
            signature={"logits_ptr": f"*{dtype}"}
            | _ROW_SIGNATURE
            | _PARTIAL_SIGNATURE
            | {"row_stride": size, "vocab_size": size, "blocks_per_split": "i32"},
            constexprs={"BLOCK": BLOCK},
            label=f"{dtype} V {size}",
        )
        for dtype, size in (("bf16", "i32:16"), ("fp16", "i32:16"), ("fp32", "i32:16"), ("bf16", "i32"))
    ),
    AotCase(
        kernel=_best_of_row_kernel,
        signature=_PARTIAL_SIGNATURE | {"tokens_ptr": "*i64", "is_finite_ptr": "*u1", "num_splits": "i32"},
        constexprs={"MAX_SPLITS": MAX_SPLITS},
        num_warps=1,
    ),
    *(
        AotCase(
            kernel=_perturb_kernel,
            signature={"logits_ptr": f"*{dtype}"}
            | _ROW_SIGNATURE
            | {"token_ids_ptr": "*i64", "out_ptr": "*fp32"}
            | dict.fromkeys(("num_columns", "row_stride", "id_row_stride"), size),
            constexprs={"BLOCK": BLOCK},
            label=f"{dtype} C {size}",
        )
        for dtype, size in (("bf16", "i32:16"), ("fp16", "i32:16"), ("fp32", "i32:16"), ("bf16", "i32"))
    ),
]
