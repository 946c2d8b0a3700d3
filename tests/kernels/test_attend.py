from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.attend import MASK_ENCODING, additive_mask, attend, windowed_mask
from eyas.kernels.build import MaskEncoding, ancestor_mask, full_mask
from eyas.kernels.tree import DraftTrees, pad_trees

RootPath = Callable[[DraftTrees, int, int], list[int]]
PagedSlots = Callable[[list[int], int], list[Tensor]]

HEAD_DIM = 8
NUM_KV_HEADS = 2
TOLERANCE = 1e-5  # float32 sums of at most 150 terms of size 1, against float64

TREES = pad_trees(
    [
        ([0], [-1]),
        (list(range(5)), [-1, 0, 0, 1, 2]),
        (list(range(9)), [-1, 0, 0, 1, 1, 2, 4, 4, 6]),
        (list(range(4)), [-1, 0, 1, 2]),
    ]
)


def pool(num_slots: int, group: int, rows: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query rows cut from a fused projection, so not contiguous, and key and value caches without a free slot."""
    generator = torch.Generator().manual_seed(num_slots)
    fused = torch.randn(batch, rows, NUM_KV_HEADS * (group + 2), HEAD_DIM, generator=generator)
    caches = torch.randn(2, num_slots, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    return fused[:, :, : NUM_KV_HEADS * group], caches[0], caches[1]


def padded(slots: list[Tensor]) -> Tensor:
    """`[B, L]`; the padding points at the first request's first slot."""
    longest = max(len(row) for row in slots)
    return torch.stack([F.pad(row, (0, longest - len(row)), value=int(slots[0][0])) for row in slots])


def attend_by_hand(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query head `[D]` over one request's visible keys `[L, D]`, in float64."""
    logits = [scale * math.fsum((query.double() * key.double()).tolist()) for key in keys]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return sum(w * value.double() for w, value in zip(weights, values, strict=True)) / math.fsum(weights)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("page_size", "offset"), [(1, 0), (16, 0), (16, 1), (16, 15), (64, 0), (64, 1), (64, 33), (64, 63)]
)
def test_rows_see_prefix_and_ancestors(
    page_size: int, offset: int, group: int, root_path: RootPath, paged_slots: PagedSlots
) -> None:
    """Catches a row that sees another branch, request or page, a head paired with the wrong keys, NaN in padding."""
    prefixes = [offset, page_size + offset, offset + 2, page_size]
    lengths = [prefix + int(count) for prefix, count in zip(prefixes, TREES.num_nodes, strict=True)]
    slots = paged_slots(lengths, page_size)
    num_slots = max(int(row.max()) for row in slots) + page_size
    query, key_cache, value_cache = pool(num_slots, group, TREES.max_nodes, TREES.batch_size)
    mask = full_mask(ancestor_mask(TREES), torch.tensor(prefixes), TREES.num_nodes)
    out = attend(query, key_cache, value_cache, padded(slots), additive_mask(mask, group, query.dtype))
    assert out.shape == query.shape
    assert bool(out.isfinite().all())
    for row, prefix in enumerate(prefixes):
        for node in range(int(TREES.num_nodes[row])):
            nodes = torch.tensor([prefix + ancestor for ancestor in root_path(TREES, row, node)])
            seen = torch.cat([slots[row][:prefix], slots[row][nodes]])
            for head in range(NUM_KV_HEADS * group):
                keys, values = key_cache[seen, head // group], value_cache[seen, head // group]
                expected = attend_by_hand(query[row, node, head], keys, values, HEAD_DIM**-0.5)
                torch.testing.assert_close(out[row, node, head].double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17])
def test_width_one_is_causal_attention(prefix: int, group: int, paged_slots: PagedSlots) -> None:
    """Catches a chain that attends differently from ordinary decoding of the same tokens."""
    num_nodes = 6
    trees = pad_trees([(list(range(num_nodes)), list(range(-1, num_nodes - 1)))])
    (slots,) = paged_slots([prefix + num_nodes], 16)
    query, key_cache, value_cache = pool(int(slots.max()) + 16, group, num_nodes, 1)
    mask = full_mask(ancestor_mask(trees), torch.tensor([prefix]), trees.num_nodes)
    out = attend(query, key_cache, value_cache, slots[None], additive_mask(mask, group, query.dtype))
    keys, values = (cache[slots].transpose(0, 1).repeat_interleave(group, dim=0) for cache in (key_cache, value_cache))
    causal = torch.ones(num_nodes, prefix + num_nodes, dtype=torch.bool).tril(diagonal=prefix)
    expected = F.scaled_dot_product_attention(query[0].transpose(0, 1), keys, values, attn_mask=causal)
    torch.testing.assert_close(out[0], expected.transpose(0, 1), rtol=0, atol=TOLERANCE)


def test_scale_multiplies_the_logits() -> None:
    """Catches a model's own attention scale being ignored."""
    query, key_cache, value_cache = pool(num_slots=3, group=1, rows=1, batch=1)
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    slots = torch.arange(3)[None]
    out = attend(query, key_cache, value_cache, slots, additive_mask(mask, 1, query.dtype), scale=0.9)
    for head in range(NUM_KV_HEADS):
        expected = attend_by_hand(query[0, 0, head], key_cache[:, head], value_cache[:, head], 0.9)
        torch.testing.assert_close(out[0, 0, head].double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("value_dim", [HEAD_DIM, 5])
def test_softcap_sinks_and_narrow_values(softcap: float | None, has_sinks: bool, value_dim: int) -> None:
    """Catches a cap before the scale, a sink of another head or with a value, and values cut to the keys' width."""
    query, key_cache, value_cache = pool(num_slots=6, group=3, rows=2, batch=1)
    value_cache = value_cache[..., :value_dim]
    sinks = torch.linspace(-2.0, 2.0, 3 * NUM_KV_HEADS) if has_sinks else None
    mask = torch.tensor([[[True, True, True, False], [True, True, False, True]]])
    slots = torch.tensor([[5, 0, 3, 2]])
    out = attend(query, key_cache, value_cache, slots, additive_mask(mask, 3, query.dtype), 0.9, softcap, sinks)
    assert out.shape == (1, 2, 3 * NUM_KV_HEADS, value_dim)
    for row, seen in enumerate([[5, 0, 3], [5, 0, 2]]):
        for head in range(3 * NUM_KV_HEADS):
            logits = 0.9 * key_cache[seen, head // 3].double() @ query[0, row, head].double()
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            sink = 0.0 if sinks is None else math.exp(float(sinks[head]))
            weights = logits.exp() / (logits.exp().sum() + sink)
            expected = weights @ value_cache[seen, head // 3].double()
            torch.testing.assert_close(out[0, row, head].double(), expected, rtol=0, atol=TOLERANCE)


def test_window_counts_text_positions() -> None:
    """Catches a window counted in columns, one that is a position off, and group rows of another node's position.

    A prefix of three and a tree of a root, two children and the second child's child: the columns of the tree stand
    for positions 3, 4, 4 and 5.
    """
    trees = pad_trees([([0, 1, 2, 3], [-1, 0, 0, 2])])
    mask = full_mask(ancestor_mask(trees), torch.tensor([3]), trees.num_nodes)
    positions = torch.tensor([[3, 4, 4, 5]])
    key_positions = torch.tensor([[0, 1, 2, 3, 4, 4, 5]])
    windowed = windowed_mask(additive_mask(mask, 2, torch.float32), 2, positions, key_positions)
    visible = [[2, 3], [3, 4], [3, 5], [5, 6]]
    for row, columns in enumerate(visible):
        for copy in (2 * row, 2 * row + 1):
            assert windowed[0, 0, copy].isfinite().nonzero().flatten().tolist() == columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_mask_repeats_rows_by_group(dtype: torch.dtype) -> None:
    """Catches group rows tiled instead of interleaved, which gives a head the mask of another node."""
    mask = torch.tensor([[[True, False], [True, True]]])
    additive = additive_mask(mask, 2, dtype)
    assert additive.dtype == dtype
    assert additive.tolist() == [[[[0.0, -math.inf], [0.0, -math.inf], [0.0, 0.0], [0.0, 0.0]]]]


def test_declares_its_mask_encoding() -> None:
    """Catches a backend whose declaration no longer names the mask its tests feed it."""
    assert MASK_ENCODING is MaskEncoding.FULL
