"""Tree attention over paged rows in Triton: the prefix without a mask, the block under packed ancestor bits.

The host chooses a tile and a number of splits from bounds it knows, so that a plan waits for nothing and a captured
launch stays right when lengths change. Long prefixes of few requests are split among programs that would be idle, and
merged by log-sum-exp. Causal rows are text in its order: their windows need no positions.

Letters: B requests, T rows, Hq / Hkv query / key-value heads, D head dim, S slots, K places of a block, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.launch_checks import check_layout
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.triton_attention_kernel import LOG2_E, attention_kernel
from eyas.kernels.triton_attention_tiling import MIN_SPLIT_KEYS, constants, tiling
from eyas.kernels.triton_merge import MAX_SPLITS, merge_splits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
PROGRAMS_PER_PROCESSOR = 2  # their loads keep the memory bus full


class TritonAttention:
    """`AttentionBackend` in Triton; `kernels.reference_attention` is its definition."""

    def __init__(self, geometry: AttentionGeometry, num_programs: int | None = None) -> None:
        """Args:
        num_programs: this many programs keep the device busy; prefixes are split where there would be fewer. None: as
            many as the device has room for.

        Raises:
            ValueError: for dtypes or head dims without a kernel.
        """
        if geometry.dtype not in DTYPES:
            raise ValueError(
                f"Triton attention: no kernel for {geometry.dtype}, only for {', '.join(map(str, DTYPES))}"
            )
        if geometry.value_head_dim != geometry.head_dim or geometry.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"Triton attention: keys and values must share a head dim of at most {MAX_HEAD_DIM}, "
                f"got {geometry.head_dim} and {geometry.value_head_dim}"
            )
        self._geometry = geometry
        self._num_programs = num_programs or PROGRAMS_PER_PROCESSOR * _num_processors(geometry.device)

    @property
    def mask_encoding(self) -> MaskEncoding:
        return MaskEncoding.PACKED

    def plan(self, rows: PagedRows) -> PlannedTriton:
        """Raises:
        ValueError: for a tensor that is not contiguous and as `PagedRows` says, or a mask that is not PACKED.
        """
        batch, device = rows.batch_size, rows.row_starts.device
        num_pages = rows.page_table.shape[-1]
        check_layout("row_starts", rows.row_starts, (batch + 1,), torch.int32, device)
        check_layout("prefix_lengths", rows.prefix_lengths, (batch,), torch.int32, device)
        check_layout("block_lengths", rows.block_lengths, (batch,), torch.int32, device)
        check_layout("page_table", rows.page_table, (batch, num_pages), torch.int32, device)
        if rows.mask is not None:
            _check_packed(rows.mask, rows)
        if rows.query_positions is not None:
            check_layout("query_positions", rows.query_positions, (rows.query_positions.numel(),), torch.int64, device)
        if rows.key_positions is not None:
            width = rows.key_positions.shape[-1]
            check_layout("key_positions", rows.key_positions, (batch, width), torch.int64, device)
        return PlannedTriton(self._geometry, rows, self._num_programs)


class PlannedTriton:
    """One step's attention, see `PlannedAttention`."""

    def __init__(self, geometry: AttentionGeometry, rows: PagedRows, num_programs: int) -> None:
        self._geometry = geometry
        self._rows = rows
        self._tiling = tiling(rows.max_rows * geometry.group, geometry.head_dim, geometry.dtype)
        self._num_row_tiles = -(-rows.max_rows * geometry.group // self._tiling.block_m)
        self._num_programs = num_programs

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        """See `PlannedAttention`; `query` may be cut from a fused projection, its last dimension contiguous.

        Raises:
            ValueError: for tensors of another layout, or a window over rows planned without positions.
        """
        self._check(query, key_cache, value_cache, options)
        out = query.new_empty(query.shape)
        if query.shape[0] == 0 or self._rows.batch_size == 0 or self._num_row_tiles == 0:
            return out
        num_splits = self._num_splits(options.window)
        if num_splits == 1:
            self._launch(query, key_cache, value_cache, options, 1, out, None)
            return out
        partial = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
        log_totals = partial.new_empty(partial.shape[:-1])
        self._launch(query, key_cache, value_cache, options, num_splits, partial, log_totals)
        merge_splits(partial, log_totals, self._rows.row_starts, out)
        return out

    def _num_splits(self, window: int | None) -> int:
        """How many programs share the prefix of a row tile, from the bounds alone."""
        num_keys = self._rows.max_prefix if window is None else min(self._rows.max_prefix, window)
        num_tiles = self._rows.batch_size * self._num_row_tiles * self._geometry.num_kv_heads
        return max(1, min(self._num_programs // num_tiles, -(-num_keys // MIN_SPLIT_KEYS), MAX_SPLITS))

    def _launch(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        options: AttentionOptions,
        num_splits: int,
        out: Tensor,
        log_totals: Tensor | None,
    ) -> None:
        geometry, rows, tile = self._geometry, self._rows, self._tiling
        has_window = options.window is not None
        has_positions = has_window and rows.mask is not None
        scale = (geometry.head_dim**-0.5 if options.scale is None else options.scale) * LOG2_E
        cap = options.softcap
        attention_kernel[(rows.batch_size * self._num_row_tiles, geometry.num_kv_heads, num_splits)](
            query,
            key_cache,
            value_cache,
            out,
            log_totals,
            rows.row_starts,
            rows.prefix_lengths,
            rows.block_lengths,
            rows.page_table,
            rows.mask,
            rows.query_positions if has_positions else None,
            rows.key_positions if has_positions else None,
            options.sinks,
            query.stride(0),
            query.stride(1),
            query.shape[0],
            0 if rows.mask is None else rows.mask.shape[1],
            0 if rows.key_positions is None else rows.key_positions.shape[1],
            rows.page_table.shape[1],
            self._num_row_tiles,
            num_splits,
            scale if cap is None else 2.0 * scale / cap,
            1.0 if cap is None else cap * LOG2_E,
            options.window or 0,
            **constants(geometry, tile, 0 if rows.mask is None else rows.mask.shape[2], has_window, cap is not None),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _check(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> None:
        geometry, device = self._geometry, self._rows.row_starts.device
        shape = (geometry.num_heads, geometry.head_dim)
        if query.shape[1:] != shape or query.dtype != geometry.dtype or query.device != device or query.stride(2) != 1:
            raise ValueError(
                f"query: expected {geometry.dtype} [rows, {shape[0]}, {shape[1]}] on {device}, its last dimension "
                f"contiguous, got {query.dtype} {list(query.shape)} on {query.device}, strides {list(query.stride())}"
            )
        cache_shape = (key_cache.shape[0], geometry.num_kv_heads, geometry.head_dim)
        check_layout("key_cache", key_cache, cache_shape, geometry.dtype, device)
        check_layout("value_cache", value_cache, cache_shape, geometry.dtype, device)
        if options.sinks is not None:
            check_layout("sinks", options.sinks, (geometry.num_heads,), options.sinks.dtype, device)
        rows = self._rows
        has_positions = rows.mask is None or (rows.query_positions is not None and rows.key_positions is not None)
        if options.window is not None and not has_positions:
            raise ValueError(
                f"a layer attends within {options.window} positions, but its rows were planned without any"
            )


def _num_processors(device: torch.device) -> int:
    """Under the interpreter, programs run one after another: a single one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check_packed(mask: Tensor, rows: PagedRows) -> None:
    shape = (rows.batch_size, max(mask.shape[1], rows.max_rows), *mask.shape[2:])
    num_bits = mask.shape[-1] * mask.dtype.itemsize * 8
    is_known = mask.dtype == torch.uint64 or (
        mask.dtype in (torch.uint8, torch.uint16, torch.uint32) and shape[-1] == 1
    )
    if mask.ndim != 3 or not is_known or num_bits < rows.max_block:
        raise ValueError(
            f"mask: expected PACKED [{rows.batch_size}, {rows.max_rows} or more, W], one unsigned word or several of "
            f"64 bits for {rows.max_block} places, got {mask.dtype} {list(mask.shape)}"
        )
    check_layout("mask", mask, shape, mask.dtype, rows.row_starts.device)
