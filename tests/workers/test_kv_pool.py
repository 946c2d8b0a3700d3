from __future__ import annotations

import pytest
import torch

from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_follow_the_text_through_the_pages(page_size: int) -> None:
    """Catches neighbouring pages being assumed, and slots in page order instead of text order."""
    layout = PoolLayout(num_pages=9, page_size=page_size)
    table = PageTable(layout, CPU)
    assert table.slots.tolist() == []
    for pages in ([7], [], [2, 8, 0]):
        table.append(pages)
    slots = [page * page_size + offset for page in (7, 2, 8, 0) for offset in range(page_size)]
    assert layout.num_slots == 9 * page_size
    assert layout.slots_of([7, 2, 8, 0]).tolist() == table.slots.tolist() == slots
    assert table.num_pages == 4
    for start in range(len(slots) + 1):
        for stop in range(start, len(slots) + 1):
            assert table.range(start, stop).tolist() == slots[start:stop]


def test_position_past_the_granted_pages_is_an_error() -> None:
    """Catches a slice cut short without a word, which would write a row of one request over another's."""
    table = PageTable(PoolLayout(num_pages=4, page_size=4), CPU)
    table.append([3, 1])
    with pytest.raises(RuntimeError, match="position 8 lies beyond the 8 slots granted"):
        table.range(2, 9)
    with pytest.raises(RuntimeError, match="position 9 lies beyond"):
        table.range(9, 10)


def test_rows_are_written_where_they_belong() -> None:
    """Catches keys written as values, another layer's rows, or another slot's."""
    pool = KVPool(PoolLayout(3, 2), num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 4, generator=generator)
    pool.write(1, torch.tensor([4, 0, 5]), keys, values)
    assert torch.equal(pool.keys[1][[4, 0, 5]], keys)
    assert torch.equal(pool.values[1][[4, 0, 5]], values)
    for cache in (pool.keys[1][[1, 2, 3]], pool.values[1][[1, 2, 3]], pool.keys[0], pool.values[0]):
        assert not bool(cache.any())


def test_caches_are_the_pool_itself() -> None:
    """Catches compaction that moves rows in a copy, or in keys alone."""
    pool = KVPool(PoolLayout(1, 2), num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.bfloat16, device=CPU)
    assert len(pool.caches) == 4
    for cache in pool.caches:
        cache.fill_(1.0)
    assert all(bool((tensor == 1).all()) for tensor in [*pool.keys, *pool.values])
    assert pool.keys[0].dtype == torch.bfloat16


def test_values_of_another_width() -> None:
    """Catches a block that compaction does not know of, and equal widths that cost two moves."""
    layout, dtype = PoolLayout(3, 2), torch.float32
    pool = KVPool(layout, 2, 2, 4, dtype, CPU, value_head_dim=3)
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 3)
    pool.write(1, torch.tensor([4, 0, 5]), keys, values)
    assert torch.equal(pool.blocks[0][1, [4, 0, 5]], keys)
    assert torch.equal(pool.blocks[1][1, [4, 0, 5]], values)
    assert not bool(pool.keys[0].any() or pool.values[0].any())
    assert [cache.shape[-1] for cache in pool.caches] == [4, 4, 3, 3]
    assert len(KVPool(layout, 2, 2, 4, dtype, CPU, value_head_dim=4).blocks) == 1
