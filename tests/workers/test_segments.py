from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.kernels.attention_options import AttentionOptions
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.segments import PagedAttention, Segment, causal_segment, tree_key_positions

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
GROUP = NUM_HEADS // NUM_KV_HEADS
TOLERANCE = 1e-5


def random_pool(num_slots: int) -> KVPool:
    """A pool full of other texts' rows."""
    layout = PoolLayout(num_slots, 1)
    pool = KVPool(layout, 2, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for cache in pool.caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def random_rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(count, NUM_HEADS, HEAD_DIM, generator=generator)
    return query, *torch.randn(2, count, NUM_KV_HEADS, HEAD_DIM, generator=generator)


def attend_by_hand(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row `[Hq, D]` over the keys it sees `[L, Hkv, D]`."""
    return torch.stack(
        [
            (keys[:, head // GROUP] @ query[head] / HEAD_DIM**0.5).softmax(0) @ values[:, head // GROUP]
            for head in range(NUM_HEADS)
        ]
    )


def check_row(pool: KVPool, layer: int, query: Tensor, slots: list[int], out: Tensor) -> None:
    expected = attend_by_hand(query, pool.keys[layer][slots], pool.values[layer][slots])
    torch.testing.assert_close(out, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("start", [0, 1, 6])
def test_causal_rows_after_a_prefix(start: int) -> None:
    """Catches a chunk whose rows see each other's future, or miss the prefix or themselves."""
    pool = random_pool(20)
    slots = torch.tensor([11, 3, 19, 0, 7, 8, 2, 15, 1])[: start + 3]
    query, key, value = random_rows(3)
    segment = causal_segment(torch.arange(3), slots, start, GROUP, torch.float32)
    out = PagedAttention(pool, slots[start:], [segment])(1, query, key, value)
    assert torch.equal(pool.keys[1][slots[start:]], key)
    assert torch.equal(pool.values[1][slots[start:]], value)
    for row in range(3):
        check_row(pool, 1, query[row], slots[: start + row + 1].tolist(), out[row])


def test_segments_of_a_step_do_not_mix() -> None:
    """Catches rows scattered to another segment's places, and padded queries or keys that leak into real ones.

    Rows 0 to 2 are a padded pair of requests of two rows and one, rows 3 and 4 a prompt chunk.
    """
    pool = random_pool(30)
    row_slots = torch.tensor([5, 9, 21, 13, 14])
    key_slots = torch.tensor([[2, 5, 9], [21, 21, 7]])  # the second request sees itself alone; the rest is padding
    mask = torch.tensor([[[True, True, False], [True, False, True]], [[True, False, False], [False, False, True]]])
    is_real = torch.tensor([[True, True], [True, False]])
    padded = Segment.build(torch.tensor([[0, 1], [2, 2]]), is_real, key_slots, mask, GROUP, torch.float32)
    chunk = causal_segment(torch.tensor([3, 4]), torch.tensor([4, 13, 14]), 1, GROUP, torch.float32)
    query, key, value = random_rows(5)
    out = PagedAttention(pool, row_slots, [padded, chunk])(0, query, key, value)
    for row, slots in enumerate([[2, 5], [2, 9], [21], [4, 13], [4, 13, 14]]):
        check_row(pool, 0, query[row], slots, out[row])


def test_lone_segment_equals_one_among_others() -> None:
    """Catches the shortcut for a step of one uniform segment taking its rows in another order."""
    key_slots = torch.tensor([[2, 5, 9], [3, 6, 10]])
    mask = torch.tensor([[[True, True, False], [True, True, True]]]).expand(2, -1, -1)
    row_slots = torch.tensor([5, 9, 6, 10, 20])
    query, key, value = random_rows(5)
    rows = torch.arange(4).view(2, 2)
    lone = Segment.build(rows, None, key_slots, mask, GROUP, torch.float32)
    other = causal_segment(torch.tensor([4]), torch.tensor([20]), 0, GROUP, torch.float32)
    out = PagedAttention(random_pool(30), row_slots[:4], [lone])(0, query[:4], key[:4], value[:4])
    among = PagedAttention(random_pool(30), row_slots, [lone, other])(0, query, key, value)
    torch.testing.assert_close(among[:4], out, rtol=TOLERANCE, atol=TOLERANCE)
    pool = random_pool(30)
    pool.write(0, row_slots, key, value)
    for row, slots in enumerate([[2, 5], [2, 5, 9], [3, 6], [3, 6, 10]]):
        check_row(pool, 0, query[row], slots, out[row])


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_windowed_rows_of_a_chunk(window: int) -> None:
    """Catches a window that the mask of another window, or of the plain layers, answers for."""
    pool = random_pool(20)
    slots = torch.tensor([11, 3, 19, 0, 7, 8, 2, 15, 1])
    query, key, value = random_rows(3)
    attention = PagedAttention(pool, slots[6:], [causal_segment(torch.arange(3), slots, 6, GROUP, torch.float32)])
    for size in (None, 2, window):
        out = attention(0, query, key, value, AttentionOptions(window=size))
        for row in range(3):
            last = 6 + row + 1
            check_row(pool, 0, query[row], slots[max(0, last - (size or last)) : last].tolist(), out[row])


def test_masks_are_made_once_per_window() -> None:
    """Catches a mask per layer, and a window that cuts nothing paying for its own."""
    segment = causal_segment(torch.arange(3), torch.arange(9), 6, GROUP, torch.float32)
    assert segment.mask_within(4) is segment.mask_within(4)
    assert segment.mask_within(None) is segment.mask_within(9) is segment.mask


def test_window_without_positions_is_an_error() -> None:
    """Catches a windowed layer that sees everything because its caller gave no positions."""
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    segment = Segment.build(torch.tensor([[0]]), None, torch.arange(3)[None], mask, GROUP, torch.float32)
    query, key, value = random_rows(1)
    attention = PagedAttention(random_pool(4), torch.tensor([2]), [segment])
    with pytest.raises(RuntimeError, match="attends within 2 positions, but its segment has no positions"):
        attention(0, query, key, value, AttentionOptions(window=2))


def test_siblings_share_a_position() -> None:
    """Catches nodes that stand where their slots are, in a ragged batch."""
    depths = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0]])
    positions = tree_key_positions(depths, torch.tensor([2, 4]), 6)
    assert positions.tolist() == [[0, 1, 2, 3, 3, 4], [0, 1, 2, 3, 4, 4]]
