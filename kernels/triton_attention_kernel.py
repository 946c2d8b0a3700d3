# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""The kernel of `triton_attention`: one tile of a request's rows over one split of the keys they see.

A program owns M rows of a request, with the query heads that share a key-value head as further rows. Keys that all of
them see (the prefix; of a causal block, what its first row sees) come in whole tiles and need no mask. The last split
then goes on to the keys after those, where a key is seen if it lies in the prefix or its bit is set:

    score(r, j) = scale * q_r . k_j,             softcap * tanh(score / softcap) with a softcap
    out(r)      = sum_j exp(score(r, j)) v_j / sum_j exp(score(r, j))         online, in base 2 and float32

A program that has all keys stores its rows' output, one of several also the log of its denominator, for `triton_merge`.

Ranges of keys follow from lengths that the device reads. Places outside a request's own are never read, nor are rows
outside the plan.

Letters: M rows of a tile (group heads of a row side by side), N keys of a tile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)

_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)


@triton.jit
def _is_seen(mask_ptr, row, is_row, start, prefix, NUM_WORDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether row `[M]` of a request sees the tile's place `[N]`, bool `[M, N]`; the tile begins in the prefix's last
    64 places or in the block."""
    column = tl.arange(0, BLOCK_N)
    if mask_ptr is None:
        is_seen = start + column[None, :] <= prefix + row[:, None]
    else:
        # The prefix as a word of ones before the row's words: what the tile needs starts at `shift` of one of them.
        word = (start - prefix + 64) // 64 - 1
        shift = ((start - prefix) & 63).to(tl.uint64)
        words_ptr = mask_ptr + row * NUM_WORDS + word
        low = tl.load(words_ptr, mask=is_row & (word >= 0), other=0).to(tl.uint64)
        low = tl.where(word < 0, tl.full(row.shape, 0xFFFFFFFFFFFFFFFF, tl.uint64), low)
        high = tl.load(words_ptr + 1, mask=is_row & (word + 1 < NUM_WORDS), other=0).to(tl.uint64)
        bits = (low >> shift) | ((high << 1) << (63 - shift))  # in two steps, as a shift by 64 is undefined
        half = tl.broadcast_to(bits.to(tl.uint32)[:, None], (row.shape[0], BLOCK_N))
        if BLOCK_N > 32:
            half = tl.where((column < 32)[None, :], half, (bits >> 32).to(tl.uint32)[:, None])
        is_seen = ((half >> (column & 31).to(tl.uint32)[None, :]) & 1) != 0
    return is_seen


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    query,
    query_position,
    key_ptr,
    value_ptr,
    pages_ptr,
    mask_ptr,
    key_positions_ptr,
    row,
    is_row,
    start,
    prefix,
    stop,
    inner_scale,
    outer_scale,
    window,
    NUM_WORDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Add the keys at places `start` … `start + BLOCK_N - 1`; those of a whole tile are seen by every row."""
    dims = tl.arange(0, BLOCK_D)
    place = start + tl.arange(0, BLOCK_N)
    is_key = place < stop
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(pages_ptr + start // PAGE_SIZE).to(tl.int64)
        slot = page * PAGE_SIZE + start % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        page = tl.load(pages_ptr + place // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + place % PAGE_SIZE
    offsets = slot[:, None] * SLOT_STRIDE + dims[None, :]
    if IS_WHOLE and HEAD_DIM == BLOCK_D:
        key = tl.load(key_ptr + offsets)
        value = tl.load(value_ptr + offsets)
    elif IS_WHOLE:
        key = tl.load(key_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(value_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        # A weight of 0 does not silence a NaN, so what no row sees must not be read, values included.
        is_own = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + offsets, mask=is_own, other=0.0)
        value = tl.load(value_ptr + offsets, mask=is_own, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * inner_scale
    if HAS_SOFTCAP:
        score = outer_scale * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    if not IS_WHOLE:
        is_seen = _is_seen(mask_ptr, row, is_row, start, prefix, NUM_WORDS, BLOCK_N)
        score = tl.where(is_seen & is_key[None, :], score, -float("inf"))
    if HAS_WINDOW:
        key_position = place
        if not IS_WHOLE and mask_ptr is not None:
            in_block = (place >= prefix) & is_key
            position = tl.load(key_positions_ptr + place - prefix, mask=in_block, other=0).to(tl.int32)
            key_position = tl.where(in_block, position, place)
        score = tl.where(key_position[None, :] > query_position[:, None] - window, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf would be NaN
    weights = tl.exp2(score - base[:, None])
    rescale = tl.exp2(top - base)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return acc, new_top, total


# Lengths and counts change from step to step: specialising on them would compile anew in the middle of serving.
@triton.jit(
    do_not_specialize=["num_rows", "mask_rows", "max_block", "num_pages", "num_row_tiles", "num_splits", "window"]
)
def attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    log_totals_ptr,
    row_starts_ptr,
    prefix_lengths_ptr,
    block_lengths_ptr,
    page_table_ptr,
    mask_ptr,
    query_positions_ptr,
    key_positions_ptr,
    sinks_ptr,
    query_row_stride,
    query_head_stride,
    num_rows,
    mask_rows,
    max_block,
    num_pages,
    num_row_tiles,
    num_splits,
    inner_scale,
    outer_scale,
    window,
    NUM_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    request = tl.program_id(0) // num_row_tiles
    first_flat = tl.program_id(0) % num_row_tiles * BLOCK_M
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row_start = tl.load(row_starts_ptr + request)
    num_own = tl.load(row_starts_ptr + request + 1) - row_start
    if first_flat >= num_own * GROUP:
        return

    flat = first_flat + tl.arange(0, BLOCK_M)
    row = flat // GROUP
    is_row = row < num_own
    head = kv_head * GROUP + flat % GROUP
    dims = tl.arange(0, BLOCK_D)
    is_cell = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptr += (row_start + row).to(tl.int64)[:, None] * query_row_stride + head[:, None] * query_head_stride
    query = tl.load(query_ptr + dims[None, :], mask=is_cell, other=0.0)

    prefix = tl.load(prefix_lengths_ptr + request)
    if mask_ptr is None:
        seen_by_all = prefix + first_flat // GROUP + 1
        stop = prefix + tl.minimum(num_own, (first_flat + BLOCK_M - 1) // GROUP + 1)
        query_position = prefix + row
    else:
        seen_by_all = prefix
        stop = prefix + tl.load(block_lengths_ptr + request)
        mask_ptr += request.to(tl.int64) * mask_rows * NUM_WORDS
        query_position = row
        if HAS_WINDOW:
            key_positions_ptr += request.to(tl.int64) * max_block
            position = tl.load(query_positions_ptr + row_start + row, mask=is_row, other=0x7FFFFFFF)
            query_position = position.to(tl.int32)
    first_tile = 0
    if HAS_WINDOW:
        # What all rows see in whole tiles stands at its own position; what a block's masks show need not.
        first_seen = tl.maximum(tl.min(query_position, axis=0) - window + 1, 0)
        first_tile = tl.minimum(first_seen, seen_by_all) // BLOCK_N
    num_tiles = seen_by_all // BLOCK_N - first_tile
    split_tiles = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_SPLIT_TILES)
    start_tile = tl.minimum(split * split_tiles, num_tiles)
    stop_tile = tl.minimum(start_tile + split_tiles, num_tiles)

    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    pages_ptr = page_table_ptr + request.to(tl.int64) * num_pages
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(first_tile + start_tile, first_tile + stop_tile):
        acc, top, total = _attend_tile(
            acc, top, total, query, query_position, key_ptr, value_ptr, pages_ptr, mask_ptr, key_positions_ptr,
            row, is_row, tile * BLOCK_N, prefix, stop, inner_scale, outer_scale, window,
            NUM_WORDS, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True,
        )  # fmt: skip
    last_stop = tl.where(split == num_splits - 1, stop, 0)
    for start in range(seen_by_all // BLOCK_N * BLOCK_N, last_stop, BLOCK_N):
        acc, top, total = _attend_tile(
            acc, top, total, query, query_position, key_ptr, value_ptr, pages_ptr, mask_ptr, key_positions_ptr,
            row, is_row, start, prefix, stop, inner_scale, outer_scale, window,
            NUM_WORDS, PAGE_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False,
        )  # fmt: skip

    # Anew in int64: outputs of many splits may need it, and rows kept from before the loops would spill.
    flat64 = first_flat + tl.arange(0, BLOCK_M).to(tl.int64)
    is_row = flat64 < num_own * GROUP
    head64 = kv_head * GROUP + flat64 % GROUP
    if sinks_ptr is not None:
        # A key without a value, seen once: by the last split.
        sink = tl.load(sinks_ptr + head64, mask=is_row & (split == num_splits - 1), other=-float("inf"))
        sink = sink.to(tl.float32) * _LOG2_E
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        acc *= tl.exp2(top - base)[:, None]
        total = total * tl.exp2(top - base) + tl.exp2(sink - base)
        top = new_top
    out_row = (split.to(tl.int64) * num_rows + row_start + flat64 // GROUP) * (NUM_KV_HEADS * GROUP) + head64
    out_ptr += out_row[:, None] * HEAD_DIM + dims[None, :]
    is_cell = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    has_keys = total != 0.0  # a NaN has, and shows
    divisor = tl.where(has_keys, total, 1.0)
    out = acc / divisor[:, None]
    if log_totals_ptr is None:
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=is_cell)
    else:
        # Not having seen a key, `top` is -inf, and so is the log; its output is left unwritten.
        tl.store(out_ptr, out, mask=is_cell & has_keys[:, None])
        tl.store(log_totals_ptr + out_row, top + tl.log2(divisor), mask=is_row)
