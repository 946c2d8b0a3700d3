from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.kernels.attention_options import AttentionOptions
from eyas.kernels.fused import rotate
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout, page_table
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, causal_rows, slots_at, text_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
GROUP = NUM_HEADS // NUM_KV_HEADS
TOLERANCE = 1e-5


def random_pool(layout: PoolLayout) -> KVPool:
    """A pool full of other texts' rows."""
    pool = KVPool(layout, 2, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for cache in pool.caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def random_rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(count, NUM_HEADS, HEAD_DIM, generator=generator)
    return query, *torch.randn(2, count, NUM_KV_HEADS, HEAD_DIM, generator=generator)


def check_row(pool: KVPool, layer: int, query: Tensor, slots: list[int], out: Tensor) -> None:
    """One row `[Hq, D]` against attention over `slots` by hand."""
    keys, values = pool.keys[layer][slots], pool.values[layer][slots]
    expected = torch.stack(
        [
            (keys[:, head // GROUP] @ query[head] / HEAD_DIM**0.5).softmax(0) @ values[:, head // GROUP]
            for head in range(NUM_HEADS)
        ]
    )
    torch.testing.assert_close(out, expected, rtol=TOLERANCE, atol=TOLERANCE)


def tables(layout: PoolLayout, *pages: list[int]) -> list[PageTable]:
    made = [PageTable(layout, torch.device("cpu")) for _ in pages]
    for table, own in zip(made, pages, strict=True):
        table.append(own)
    return made


@pytest.mark.parametrize("start", [0, 1, 6])
def test_causal_rows_after_a_prefix(start: int) -> None:
    """Catches a chunk whose rows see each other's future, or miss the prefix or themselves."""
    pool = random_pool(PoolLayout(20, 1))
    slots = torch.tensor([11, 3, 19, 0, 7, 8, 2, 15, 1])[: start + 3]
    query, key, value = random_rows(3)
    out = text_attention(pool, NUM_HEADS, slots, start)(1, query, key, value)
    assert torch.equal(pool.keys[1][slots[start:]], key)
    assert torch.equal(pool.values[1][slots[start:]], value)
    for row in range(3):
        check_row(pool, 1, query[row], slots[: start + row + 1].tolist(), out[row])


@pytest.mark.parametrize("page_size", [1, 4])
def test_groups_of_a_step_do_not_mix(page_size: int) -> None:
    """Catches rows of one group attended as another's, and chunks of a group that see each other's keys."""
    layout = PoolLayout(24 // page_size, page_size)
    pool = random_pool(layout)
    order = torch.randperm(layout.num_pages, generator=torch.Generator().manual_seed(3)).tolist()
    third = layout.num_pages // 3
    a, b, c = tables(layout, order[:third], order[third : 2 * third], order[2 * third :])
    backend = ReferenceAttention(pool.geometry(NUM_HEADS))
    first = AttentionGroup(2, backend.plan(causal_rows([3], [2], page_table([a]))))
    both = AttentionGroup(3, backend.plan(causal_rows([0, 5], [1, 2], page_table([b, c]))))
    query, key, value = random_rows(5)
    row_slots = torch.cat([a.range(3, 5), b.range(0, 1), c.range(5, 7)])
    out = PagedAttention(pool, row_slots, [first, both])(0, query, key, value)
    seen = [a.range(0, 4), a.range(0, 5), b.range(0, 1), c.range(0, 6), c.range(0, 7)]
    for row, slots in enumerate(seen):
        check_row(pool, 0, query[row], slots.tolist(), out[row])


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_windowed_rows_of_a_chunk(window: int) -> None:
    """Catches a window that the mask of another window, or of the plain layers, answers for."""
    pool = random_pool(PoolLayout(20, 1))
    slots = torch.tensor([11, 3, 19, 0, 7, 8, 2, 15, 1])
    query, key, value = random_rows(3)
    attention = text_attention(pool, NUM_HEADS, slots, 6)
    for size in (None, 2, window):
        out = attention(0, query, key, value, AttentionOptions(window=size))
        for row in range(3):
            last = 6 + row + 1
            check_row(pool, 0, query[row], slots[max(0, last - (size or last)) : last].tolist(), out[row])


def test_fused_rotation_equals_rotation_before() -> None:
    """Catches a fused form that stores unrotated keys, rotates values, or writes to another layer."""
    slots = torch.tensor([4, 2, 7])
    qkv = torch.randn(3, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    angles = torch.rand(3, 1, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    rotation = (angles.cos(), angles.sin())
    pool, expected_pool = random_pool(PoolLayout(9, 1)), random_pool(PoolLayout(9, 1))
    query, key, value = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    expected = text_attention(expected_pool, NUM_HEADS, slots)(1, rotate(query, rotation), rotate(key, rotation), value)
    out = text_attention(pool, NUM_HEADS, slots).rotated(1, qkv.clone(), rotation, NUM_HEADS)
    assert torch.equal(out, expected)
    for cache, reference in zip(pool.caches, expected_pool.caches, strict=True):
        assert torch.equal(cache, reference)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_through_the_page_table(page_size: int) -> None:
    """Catches places of one request looked up in another's pages, and offsets within a page."""
    layout = PoolLayout(12, page_size)
    own = tables(layout, [5, 2, 9], [0, 11, 7])
    places = torch.tensor([[0, page_size, 3 * page_size - 1], [2 * page_size, 1 % page_size, 0]])
    found = slots_at(page_table(own), places, page_size)
    assert found.tolist() == [own[row].slots[places[row]].tolist() for row in range(2)]
