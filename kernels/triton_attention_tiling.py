"""Tile shapes of the attention kernel, and the specialisations that follow from them.

They are the largest whose registers `ptxas` does not spill on sm_80, sm_90 and sm_100, with one tile of keys and values
on its way while another is multiplied. Wide tiles matter for large trees: a request's keys are read once per tile of
its rows.

Letters: M rows of a tile (rows of a request times group), N keys of a tile, D head dim, W words of a mask row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.kernels.aot import AotCase
from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.triton_attention_kernel import attention_kernel

MIN_SPLIT_KEYS = 128  # a shorter split costs more to merge than it saves


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shape of a program: M rows of a request times group, N keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 5  # the page's number, then the keys at it, each with one tile on its way and one in use


def tiling(num_group_rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """The tile for requests of up to `num_group_rows` rows times group."""
    block_d = _padded(head_dim)
    if dtype == torch.float32:  # multiplied outside the tensor cores, from registers
        return Tiling(16, 32, 4) if block_d <= 64 else Tiling(16, 16, 4 if block_d == 128 else 8, num_stages=3)
    block_m = min(max(16, _power_of_2(num_group_rows)), 128 if block_d <= 128 else 64)
    if block_d <= 64:
        return Tiling(block_m, 64, 8 if block_m == 128 else 4)
    if block_d == 128:
        return Tiling(block_m, 32 if block_m == 128 else 64, 8 if block_m >= 64 else 4)
    return Tiling(block_m, 32, 4 if block_m == 16 else 8)


def constants(
    geometry: AttentionGeometry, tile: Tiling, num_words: int, has_window: bool, has_softcap: bool
) -> dict[str, object]:
    """Compile-time arguments of the kernel."""
    return {
        "NUM_WORDS": num_words,
        "GROUP": geometry.group,
        "NUM_KV_HEADS": geometry.num_kv_heads,
        "PAGE_SIZE": geometry.page_size,
        "HEAD_DIM": geometry.head_dim,
        "BLOCK_D": _padded(geometry.head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "MIN_SPLIT_TILES": max(1, MIN_SPLIT_KEYS // tile.block_n),
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
    }


def _padded(head_dim: int) -> int:
    return max(16, _power_of_2(head_dim))  # a matrix product sums over 16 terms at least


def _power_of_2(size: int) -> int:
    """The next one, or `size` itself."""
    return 1 << (size - 1).bit_length()


def _aot_case(
    label: str,
    dtype: torch.dtype,
    head_dim: int,
    num_group_rows: int,
    *,
    mask: tuple[str, int] | None = ("u8", 1),
    group: int = 4,
    page_size: int = 16,
    is_split: bool = True,
    has_window: bool = False,
    has_softcap: bool = False,
    has_sinks: bool = False,
) -> AotCase:
    """`mask` is type and W of the words; None: causal."""
    tile = tiling(num_group_rows, head_dim, dtype)
    geometry = AttentionGeometry(8 * group, 8, head_dim, head_dim, page_size, dtype, torch.device("cuda"))
    element = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    pointers = {
        "query_ptr": element,
        "key_ptr": element,
        "value_ptr": element,
        "out_ptr": "fp32" if is_split else element,
        "log_totals_ptr": "fp32" if is_split else None,
        "row_starts_ptr": "i32",
        "prefix_lengths_ptr": "i32",
        "block_lengths_ptr": "i32",
        "page_table_ptr": "i32",
        "mask_ptr": mask[0] if mask is not None else None,
        "query_positions_ptr": "i64" if has_window and mask is not None else None,
        "key_positions_ptr": "i64" if has_window and mask is not None else None,
        "sinks_ptr": element if has_sinks else None,
    }
    bounds = ("num_rows", "mask_rows", "max_block", "num_pages", "num_row_tiles", "num_splits", "window")
    return AotCase(
        kernel=attention_kernel,
        signature={name: f"*{kind}" for name, kind in pointers.items() if kind is not None}
        | dict.fromkeys(("query_row_stride", "query_head_stride"), "i32:16")
        | dict.fromkeys(bounds, "i32")
        | dict.fromkeys(("inner_scale", "outer_scale"), "fp32"),
        constexprs={name: None for name, kind in pointers.items() if kind is None}
        | constants(geometry, tile, mask[1] if mask is not None else 0, has_window, has_softcap),
        num_warps=tile.num_warps,
        label=f"{label} {element} D={head_dim} M={tile.block_m}",
        num_stages=tile.num_stages,
    )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

AOT = [
    _aot_case("decode", _BF16, 128, 4),
    _aot_case("verify", _BF16, 128, 32),
    _aot_case("verify 16", _BF16, 128, 64, mask=("u16", 1), page_size=64),
    _aot_case("verify 128", _BF16, 128, 512, mask=("u64", 2), is_split=False),
    _aot_case("prefill", _BF16, 128, 2048, mask=None, is_split=False),
    _aot_case("verify", _FP16, 64, 64, mask=("u16", 1)),
    _aot_case("prefill", _BF16, 64, 4096, mask=None, has_window=True, has_sinks=True),
    _aot_case("verify", _BF16, 80, 32, group=1, mask=("u32", 1)),
    _aot_case("verify", _BF16, 96, 64, group=1, mask=("u64", 1), page_size=1),
    _aot_case("verify", _BF16, 256, 16, group=2, has_window=True, has_softcap=True),
    _aot_case("prefill", _BF16, 256, 1024, group=2, mask=None, has_window=True, has_softcap=True),
    _aot_case("verify", _FP32, 256, 64, group=2, has_window=True, has_softcap=True),
    _aot_case("verify", _FP32, 64, 24, group=3),
]
