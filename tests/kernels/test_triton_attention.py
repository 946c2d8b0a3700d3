from __future__ import annotations

from dataclasses import replace
from typing import Any

import parity_attention
import pytest
import torch
from attention_scene import PADDING, Request, Scene, chain, random_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import DEVICE

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.triton_attention import MAX_SPLITS, TritonAttention
from eyas.kernels.triton_attention_tiling import MIN_SPLIT_KEYS


@st.composite
def forests(draw: st.DrawFn) -> Request:
    """A request of any prefix whose block is a forest, of which the last places are rows."""
    prefix, size = draw(st.integers(0, 40)), draw(st.integers(0, 20))
    if size == 0:
        return PADDING
    parents = [draw(st.integers(-1, place - 1)) for place in range(size)]
    return Request(prefix, parents, draw(st.integers(1, size)))


@settings(max_examples=40)
@given(
    requests=st.lists(forests(), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16, 64]),
    group=st.integers(1, 4),
    window=st.sampled_from([None, 1, 5, 30]),
    has_sinks=st.booleans(),
    num_spare_rows=st.integers(0, 2),
)
def test_ragged_forests(
    requests: list[Request], page_size: int, group: int, window: int | None, has_sinks: bool, num_spare_rows: int
) -> None:
    """Catches what the named regimes of the parity matrix leave out."""
    scene = parity_attention.make_scene(
        requests, page_size=page_size, group=group, num_kv_heads=1, num_spare_rows=num_spare_rows
    )
    sinks = torch.linspace(-1.0, 1.0, group, device=DEVICE) if has_sinks else None
    parity_attention.agree_with_float64(scene, AttentionOptions(window=window, sinks=sinks))


@settings(max_examples=15)
@given(
    chains=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), min_size=1, max_size=4), group=st.integers(1, 4)
)
def test_ragged_chunks(chains: list[tuple[int, int]], group: int) -> None:
    """Catches a diagonal that depends on where a tile of rows begins."""
    requests = [chain(*each) if each[1] else PADDING for each in chains]
    parity_attention.agree_with_float64(
        parity_attention.make_scene(requests, is_causal=True, group=group, num_kv_heads=1)
    )


def num_splits(rows: PagedRows, num_programs: int, window: int | None = None) -> int:
    """For four key-value heads of sixteen rows a tile."""
    scene = Scene([PADDING], num_kv_heads=4, group=1)
    return TritonAttention(scene.geometry, num_programs).plan(rows)._num_splits(window)


def test_splits_fill_the_device_and_no_more() -> None:
    """Catches idle processors at one long request, and splits that only cost a merge."""
    rows = Scene([chain(3, 2)], num_kv_heads=4, group=1).rows(MaskEncoding.PACKED, max_prefix=100 * MIN_SPLIT_KEYS)
    assert num_splits(rows, num_programs=264) == 66
    assert num_splits(replace(rows, max_prefix=4000), num_programs=264) == 4000 // MIN_SPLIT_KEYS + 1
    assert num_splits(replace(rows, max_prefix=0), num_programs=264) == 1
    assert num_splits(rows, num_programs=264, window=MIN_SPLIT_KEYS) == 1
    assert num_splits(rows, num_programs=7) == 1
    assert num_splits(replace(rows, max_prefix=10**6), num_programs=10**4) == MAX_SPLITS
    many = Scene([chain(3, 2)] * 64).rows(MaskEncoding.PACKED, max_prefix=10**5)
    assert num_splits(many, num_programs=264) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float64}, "no kernel for torch.float64"),
        ({"value_head_dim": 8}, "must share a head dim of at most 256, got 16 and 8"),
        ({"head_dim": 512, "value_head_dim": 512}, "must share a head dim of at most 256, got 512 and 512"),
    ],
)
def test_refuses_geometries(changes: dict[str, Any], message: str) -> None:
    """Catches a geometry that fails only when its first step is launched."""
    with pytest.raises(ValueError, match=message):
        TritonAttention(replace(Scene([PADDING]).geometry, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_starts": torch.zeros(3)}, "row_starts: expected torch.int32"),
        ({"prefix_lengths": torch.zeros(2, dtype=torch.int64)}, "prefix_lengths: expected torch.int32"),
        ({"block_lengths": torch.zeros(3, dtype=torch.int32)}, r"block_lengths: expected torch.int32 \[2\]"),
        ({"page_table": torch.zeros(4, 2, dtype=torch.int32).t()}, "page_table: expected contiguous"),
        ({"mask": torch.ones(2, 3, 3, dtype=torch.bool)}, "mask: expected PACKED"),
        ({"mask": torch.ones(2, 3, 3, dtype=torch.int64)}, "mask: expected PACKED"),
        ({"mask": torch.ones(2, 3, 2, dtype=torch.uint8)}, "mask: expected PACKED"),
        ({"mask": torch.ones(2, 3, dtype=torch.uint8)}, "mask: expected PACKED"),
        ({"max_block": 9}, "mask: expected PACKED .* for 9 places, got torch.uint8"),
        ({"max_rows": 4}, r"mask: expected torch.uint8 \[2, 4, 1\]"),
        ({"query_positions": torch.zeros(5, dtype=torch.int32)}, "query_positions: expected torch.int64"),
        ({"key_positions": torch.zeros(3, 3, dtype=torch.int64)}, r"key_positions: expected torch.int64 \[2, 3\]"),
    ],
)
def test_refuses_rows(changes: dict[str, Any], message: str) -> None:
    """Catches tensors whose memory the kernel would read as something else."""
    scene = Scene([random_tree(3, 3), random_tree(4, 2)])
    rows = scene.rows(MaskEncoding.PACKED, **changes)
    with pytest.raises(ValueError, match=message):
        TritonAttention(scene.geometry).plan(rows)


def test_refuses_tensors_of_a_layer() -> None:
    """Catches tensors whose memory the kernel would read as something else, and windows without positions."""
    scene = Scene([random_tree(3, 3)])
    query, keys, values = scene.query, scene.key_cache, scene.value_cache
    plan = TritonAttention(scene.geometry).plan(scene.rows(MaskEncoding.PACKED, query_positions=None))
    for arguments, message in [
        ((query.double(), keys, values, PLAIN_ATTENTION), "query: expected torch.float32"),
        ((query[:, :2], keys, values, PLAIN_ATTENTION), "query: expected torch.float32"),
        (
            (query.transpose(0, 2).contiguous().transpose(0, 2), keys, values, PLAIN_ATTENTION),
            "last dimension contiguous",
        ),
        (
            (query, keys.transpose(0, 1).contiguous().transpose(0, 1), values, PLAIN_ATTENTION),
            "key_cache: expected cont",
        ),
        ((query, keys, values[:-1], PLAIN_ATTENTION), "value_cache: expected torch.float32"),
        ((query, keys, values, AttentionOptions(sinks=torch.zeros(3))), r"sinks: expected torch.float32 \[4\]"),
        (
            (query, keys, values, AttentionOptions(window=2)),
            "attends within 2 positions, but its rows were planned without",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            plan(*arguments)
