from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_scene import PADDING, Request, Scene, chain, random_tree
from torch import Tensor

from eyas.kernels.attend import additive_mask, attend
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.reference_attention import PlannedReference, ReferenceAttention

TOLERANCE = 1e-5  # float32 sums of at most 100 terms of size 1, against float64
LEVEL = Request(5, [-1, -1, 0, 0, 1, 2, 3, 4], num_rows=3)  # the last level of a draft: its ancestors are no rows


def planned(scene: Scene) -> PlannedReference:
    return ReferenceAttention(scene.geometry).plan(scene.rows(MaskEncoding.FULL))


def attended(scene: Scene, options: AttentionOptions = PLAIN_ATTENTION) -> Tensor:
    return planned(scene)(scene.query, scene.key_cache, scene.value_cache, options)


def check(scene: Scene, options: AttentionOptions = PLAIN_ATTENTION) -> None:
    out = attended(scene, options)
    assert out.shape == (scene.query.shape[0], scene.geometry.num_heads, scene.geometry.value_head_dim)
    torch.testing.assert_close(out[: scene.num_rows].double(), scene.expected(options), rtol=0, atol=TOLERANCE)


def test_declares_its_mask_encoding() -> None:
    """Catches a declaration that no longer names the mask its tests feed it."""
    assert ReferenceAttention(Scene([PADDING]).geometry).mask_encoding is MaskEncoding.FULL


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 64])
def test_trees_of_one_size(prefix: int, page_size: int) -> None:
    """Catches pages walked in another order, and the shortcut without padding mixing requests or rows."""
    check(Scene([random_tree(prefix, 5, seed=seed) for seed in range(3)], page_size=page_size))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_spare_rows", [0, 2])
def test_ragged_trees_with_padding_requests(page_size: int, num_spare_rows: int) -> None:
    """Catches rows handed to another request, padding requests that shift it, and NaN from places nobody owns."""
    requests = [PADDING, random_tree(17, 9), PADDING, random_tree(0, 1), LEVEL, random_tree(63, 4), PADDING]
    check(Scene(requests, page_size=page_size, group=3, num_spare_rows=num_spare_rows))


@pytest.mark.parametrize("num_spare_rows", [0, 2])
def test_causal_rows(num_spare_rows: int) -> None:
    """Catches a chunk that sees its future or another's keys, and a diagonal counted from another request's prefix."""
    requests = [chain(3, 4), PADDING, chain(0, 1), chain(20, 7)]
    check(Scene(requests, page_size=4, is_causal=True, num_spare_rows=num_spare_rows))


def test_one_chunk_equals_a_chain() -> None:
    """Catches the causal shortcut for a single request drifting from the tree that has no branches."""
    requests = [chain(10, 6)]
    out = attended(Scene(requests, is_causal=True))
    torch.testing.assert_close(out, attended(Scene(requests)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("requests", [[], [PADDING, PADDING]])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_spare_rows", [0, 2])
def test_nothing_to_attend(requests: list[Request], is_causal: bool, num_spare_rows: int) -> None:
    """Catches a step without rows that fails on empty maxima."""
    check(Scene(requests, is_causal=is_causal, num_spare_rows=num_spare_rows))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2.0, 2.0, 4)])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_options(is_causal: bool, sinks: Tensor | None, softcap: float | None, window: int | None) -> None:
    """Catches an option that does not reach the sums, and windows counted in places where siblings share a position."""
    trees = [random_tree(6, 6), random_tree(2, 9), LEVEL]
    scene = Scene([chain(6, 6), chain(0, 9)] if is_causal else trees, value_head_dim=5, is_causal=is_causal)
    check(scene, AttentionOptions(scale=0.9, window=window, softcap=softcap, sinks=sinks))


def test_layers_share_a_plan() -> None:
    """Catches a window whose mask answers for the plain layers or for another window."""
    scene = Scene([random_tree(6, 6), random_tree(2, 9)])
    plan = planned(scene)
    for window in (None, 2, 4, None, 2):
        options = AttentionOptions(window=window)
        out = plan(scene.query, scene.key_cache, scene.value_cache, options)
        torch.testing.assert_close(out.double(), scene.expected(options), rtol=0, atol=TOLERANCE)


def test_equals_attend_to_the_last_bit() -> None:
    """Catches padding, gathering or another mask form creeping into steps that need none."""
    scene = Scene([random_tree(20, 4, seed=seed) for seed in range(2)])
    mask = scene.rows(MaskEncoding.FULL).mask
    assert mask is not None
    slots = torch.stack([scene.slots(index)[:24] for index in range(2)])
    query = scene.query.view(2, 4, *scene.query.shape[1:])
    expected = attend(query, scene.key_cache, scene.value_cache, slots, additive_mask(mask, 2, torch.float32))
    assert torch.equal(attended(scene), expected.flatten(0, 1))


def test_window_without_positions_is_an_error() -> None:
    """Catches a windowed layer that sees everything because its caller gave no positions."""
    scene = Scene([chain(3, 2)])
    rows = scene.rows(MaskEncoding.FULL, query_positions=None)
    plan = ReferenceAttention(scene.geometry).plan(rows)
    plan(scene.query, scene.key_cache, scene.value_cache)
    with pytest.raises(ValueError, match="attends within 2 positions, but its rows were planned without any"):
        plan(scene.query, scene.key_cache, scene.value_cache, AttentionOptions(window=2))


def test_refuses_masks_and_tables_that_do_not_fit() -> None:
    """Catches another backend's mask read as columns, and keys read beyond the granted pages."""
    scene = Scene([random_tree(20, 4)])
    backend = ReferenceAttention(scene.geometry)
    with pytest.raises(ValueError, match=r"expected a FULL mask, bool \[1, rows, 24 keys or more\], got torch.uint8"):
        backend.plan(scene.rows(MaskEncoding.PACKED))
    full = scene.rows(MaskEncoding.FULL)
    with pytest.raises(ValueError, match="24 keys lie beyond the 16 places of the page table"):
        backend.plan(replace(full, page_table=full.page_table[:, :1]))
