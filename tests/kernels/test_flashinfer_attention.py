"""What the FlashInfer backends refuse, and how they lend the library's wrappers. Numbers are in the parity matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flashinfer_double
import pytest
import torch
from attention_scene import chain
from parity_flashinfer import Backend, rows_of, scene_of

from eyas.kernels import flashinfer_rows
from eyas.kernels.attention_options import AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.flashinfer_attention import CascadeFlashInfer, MaskedFlashInfer

flashinfer_double.install()

BOTH = pytest.mark.parametrize("backend", [MaskedFlashInfer, CascadeFlashInfer])
SCENE = scene_of([chain(20, 3), chain(40, 2)])
WINDOW = AttentionOptions(window=2)


@BOTH
def test_wrappers_are_used_again(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrapper, with its megabytes of pinned memory, made anew in every step."""
    import flashinfer

    made = []

    class Counted(flashinfer.BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            made.append(self)
            super().__init__(*args, **keywords)

    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Counted)
    attention = backend(SCENE.geometry)
    rows = rows_of(SCENE, attention.mask_encoding)
    counts = []
    for _step in range(4):
        attention.plan(rows)(SCENE.query, SCENE.key_cache, SCENE.value_cache)
        counts.append(len(made))
    calls = 1 if backend is MaskedFlashInfer else 2
    assert counts == [calls] * 4


@BOTH
def test_a_wrapper_returned_within_a_step_waits_for_the_device(backend: Backend) -> None:
    """Catches a plan written over while the device may still have to read it: nothing waits between these two."""
    attention = backend(SCENE.geometry)
    rows = rows_of(SCENE, attention.mask_encoding)
    first, second = attention.plan(rows), attention.plan(rows)
    first(SCENE.query, SCENE.key_cache, SCENE.value_cache)
    used = list(first._borrowed)
    del first
    second(SCENE.query, SCENE.key_cache, SCENE.value_cache)
    assert not {id(wrapper) for wrapper in used} & {id(wrapper) for wrapper in second._borrowed}


def test_cascade_refuses_windows() -> None:
    """Catches a layer that sees more than its model was trained to, in a model whose config did not tell."""
    attention = CascadeFlashInfer(SCENE.geometry)
    plan = attention.plan(rows_of(SCENE, attention.mask_encoding))
    with pytest.raises(ValueError, match="flashinfer-cascade cannot attend within 2 positions.*; use flashinfer"):
        plan(SCENE.query, SCENE.key_cache, SCENE.value_cache, WINDOW)


def test_window_without_positions_is_an_error() -> None:
    """Catches a windowed layer that sees everything because its caller gave no positions."""
    plan = MaskedFlashInfer(SCENE.geometry).plan(SCENE.rows(MaskEncoding.FULL, query_positions=None))
    with pytest.raises(ValueError, match="attends within 2 positions, but its rows were planned without any"):
        plan(SCENE.query, SCENE.key_cache, SCENE.value_cache, WINDOW)


def test_masks_in_another_encoding_are_refused() -> None:
    """Catches prefix columns read as places of a block, and words read as columns."""
    packed = SCENE.rows(MaskEncoding.PACKED)
    with pytest.raises(ValueError, match=r"expected a FULL mask, bool \[2, rows, 42 keys or more\], got torch.uint8"):
        MaskedFlashInfer(SCENE.geometry).plan(packed)
    for rows in (packed, SCENE.rows(MaskEncoding.FULL)):
        with pytest.raises(ValueError, match=r"expected a TREE_ONLY mask, bool \[2, rows, at most 3 places\]"):
            CascadeFlashInfer(SCENE.geometry).plan(rows)


@BOTH
def test_pages_that_were_not_granted_are_an_error(backend: Backend) -> None:
    """Catches keys read from another request's pages."""
    attention = backend(SCENE.geometry)
    rows = rows_of(SCENE, attention.mask_encoding)
    with pytest.raises(ValueError, match="3 pages lie beyond the 2 of the page table"):
        attention.plan(replace(rows, page_table=rows.page_table[:, :2]))


@BOTH
def test_a_pool_of_broken_pages_is_an_error(backend: Backend) -> None:
    """Catches a view that puts every page elsewhere."""
    attention = backend(SCENE.geometry)
    plan = attention.plan(rows_of(SCENE, attention.mask_encoding))
    with pytest.raises(ValueError, match=r"a pool of \d+ slots does not consist of pages of 16"):
        plan(SCENE.query, SCENE.key_cache[:-1], SCENE.value_cache[:-1])


def test_masks_beyond_the_librarys_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches offsets that wrap around and hand requests each other's masks."""
    monkeypatch.setattr(flashinfer_rows, "MAX_MASK_BITS", 3 * 23 + 2 * 42 - 1)
    attention = MaskedFlashInfer(SCENE.geometry)
    with pytest.raises(ValueError, match="this one has 153; use flashinfer-cascade"):
        attention.plan(SCENE.rows(MaskEncoding.FULL))


@BOTH
def test_the_mask_is_all_that_grows_with_the_context(backend: Backend) -> None:
    """Catches a cascade that fills bits for the prefix after all: bools handed over for 3 + 2 rows."""
    attention = backend(SCENE.geometry)
    plan = attention.plan(rows_of(SCENE, attention.mask_encoding))
    (mask,) = [call.mask(None) for call in plan._calls if call.mask is not None]
    assert mask.dtype == torch.bool
    assert mask.numel() == (3 * 23 + 2 * 42 if backend is MaskedFlashInfer else 5 * 3)
