"""Parity of FlashInfer's two forms of tree attention with a softmax written out in float64.

On a machine with a CUDA device and the library these cases run the library's own kernels there; elsewhere a double of
it, so that they show what Eyas hands over, not what the kernels make of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flashinfer_double
import torch
from attention_scene import PADDING, Request, Scene, chain, random_tree
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.flashinfer_attention import CascadeFlashInfer, MaskedFlashInfer
from eyas.kernels.paged_rows import PagedRows

flashinfer_double.install()

Backend = type[MaskedFlashInfer] | type[CascadeFlashInfer]

# Values reach 3: they are rounded once, in the cascade once more for each part and each join.
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

LEVEL = Request(5, [-1, -1, 0, 0, 1, 2, 3, 4], num_rows=3)  # the last level of a draft: its ancestors are no rows
STAR = Request(9, [-1, 0, 0, 0, 0])
TWINS = Request(4, [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8])  # two long branches side by side: places run ahead of positions


def scene_of(requests: list[Request], **options: Any) -> Scene:
    return Scene(requests, **({"head_dim": 64, "dtype": torch.float16, "device": DEVICE} | options))


def rows_of(scene: Scene, encoding: MaskEncoding) -> PagedRows:
    """The scene's rows, masks in the encoding asked for; what stands in padding is never to be read."""
    if scene.is_causal or encoding is MaskEncoding.FULL:
        return scene.rows(MaskEncoding.FULL)
    counts = [len(request.rows) for request in scene.requests]
    places = max(len(request.parents) for request in scene.requests)
    mask = torch.ones(len(counts), max(counts), places, dtype=torch.bool)
    for index, request in enumerate(scene.requests):
        for row, place in enumerate(request.rows):
            mask[index, row, : len(request.parents)] = False
            mask[index, row, request.path(place)] = True
    return scene.rows(MaskEncoding.PACKED, mask=mask.to(DEVICE))


def compare(out: Tensor, scene: Scene, options: AttentionOptions = PLAIN_ATTENTION) -> None:
    assert out.shape == (scene.query.shape[0], scene.geometry.num_heads, scene.geometry.head_dim)
    found = out[: scene.num_rows].double().cpu()
    torch.testing.assert_close(found, scene.expected(options), rtol=0, atol=TOLERANCES[scene.geometry.dtype])


def agree(backend: Backend, *scenes: Scene, options: AttentionOptions = PLAIN_ATTENTION) -> None:
    """Steps of one engine side, one after another."""
    attention = backend(scenes[0].geometry)
    for scene in scenes:
        plan = attention.plan(rows_of(scene, attention.mask_encoding))
        compare(plan(scene.query, scene.key_cache, scene.value_cache, options), scene, options)


def plain(requests: list[Request], **options: Any) -> Callable[[Backend], None]:
    def check(backend: Backend) -> None:
        agree(backend, scene_of(requests, **options))

    return check


def with_options(options: AttentionOptions, requests: list[Request], **scene: Any) -> Callable[[Backend], None]:
    def check(backend: Backend) -> None:
        sinks = None if options.sinks is None else options.sinks.to(DEVICE)
        moved = AttentionOptions(options.scale, options.window, options.softcap, sinks)
        agree(backend, scene_of(requests, **scene), options=moved)

    return check


def with_keys_scaled(gain: float) -> Callable[[Backend], None]:
    def check(backend: Backend) -> None:
        scene = scene_of(TREES)
        scene.key_cache.mul_(gain)
        agree(backend, scene)

    return check


def page_boundaries(page_size: int) -> Callable[[Backend], None]:
    def check(backend: Backend) -> None:
        prefixes = (1, page_size - 1, page_size, page_size + 1)
        trees = [random_tree(prefix, 5, seed=prefix) for prefix in prefixes if prefix > 0]
        agree(backend, scene_of(trees, page_size=page_size))

    return check


def nobody(num_requests: int) -> Callable[[Backend], None]:
    def check(backend: Backend) -> None:
        scene = scene_of([chain(2, 2), chain(9, 1)])
        attention = backend(scene.geometry)
        rows = rows_of(scene, attention.mask_encoding)
        assert rows.mask is not None
        lengths = rows.prefix_lengths[:num_requests], rows.block_lengths[:num_requests]
        starts = torch.zeros(num_requests + 1, dtype=torch.int32, device=DEVICE)
        for mask in (rows.mask[:num_requests], None):
            nothing = PagedRows(
                starts, *lengths, rows.page_table[:num_requests], mask, rows.max_rows, rows.max_block, rows.max_prefix
            )
            out = attention.plan(nothing)(scene.query, scene.key_cache, scene.value_cache)
            assert out.shape == scene.query.shape

    return check


def stale_padding(backend: Backend) -> None:
    scene = scene_of([PADDING, random_tree(17, 6), PADDING, chain(3, 4)])
    attention = backend(scene.geometry)
    rows = rows_of(scene, attention.mask_encoding)
    rows.prefix_lengths[::2] = 3000
    rows.block_lengths[::2] = 40
    compare(attention.plan(rows)(scene.query, scene.key_cache, scene.value_cache), scene)


def alternating_layers(backend: Backend) -> None:
    scene = scene_of([random_tree(6, 6), random_tree(2, 9)])
    attention = backend(scene.geometry)
    plan = attention.plan(rows_of(scene, attention.mask_encoding))
    for softcap, scale in ((None, None), (0.7, None), (None, 0.3), (None, None), (0.7, None)):
        options = AttentionOptions(softcap=softcap, scale=scale)
        compare(plan(scene.query, scene.key_cache, scene.value_cache, options), scene, options)


def trees_beside_chunks(backend: Backend) -> None:
    trees, chunks = scene_of([random_tree(20, 7), STAR]), scene_of([chain(3, 9), chain(0, 5)], is_causal=True, seed=1)
    attention = backend(trees.geometry)
    plans = [(scene, attention.plan(rows_of(scene, attention.mask_encoding))) for scene in (trees, chunks)]
    for _layer in range(2):
        for scene, plan in plans:
            compare(plan(scene.query, scene.key_cache, scene.value_cache), scene)


def step_after_step(backend: Backend) -> None:
    steps = [[random_tree(20, 7)], [random_tree(3, 2), STAR, PADDING], [chain(40, 1)]]
    agree(backend, *(scene_of(requests, seed=seed) for seed, requests in enumerate(steps)))


def poisoned_neighbour(backend: Backend) -> None:
    scene = scene_of([random_tree(20, 5), random_tree(9, 4), random_tree(18, 3)])
    scene.key_cache[scene.slots(1)] = torch.nan
    scene.value_cache[scene.slots(1)] = torch.nan
    attention = backend(scene.geometry)
    plan = attention.plan(rows_of(scene, attention.mask_encoding))
    out = plan(scene.query, scene.key_cache, scene.value_cache).double().cpu()
    keep = torch.tensor([*range(5), *range(9, 12)])
    torch.testing.assert_close(out[keep], scene.expected()[keep], rtol=0, atol=TOLERANCES[torch.float16])
    assert bool(out[5:9].isnan().all())


TREES = [random_tree(6, 6), random_tree(30, 9), LEVEL]
CHUNKS = [chain(6, 6), PADDING, chain(0, 9)]

# Each regime with the fault it catches.
CHECKS: dict[str, Callable[[Backend], None]] = {
    # A pair of bounds off by one, where there is nothing else to be right.
    "one_node": plain([chain(20, 1)]),
    # Weights normalised over too many or too few keys, of the prefix or of the block.
    "ties": with_keys_scaled(0.0),
    # Rows that see their descendants or miss their oldest ancestor.
    "width_1": plain([chain(20, 12)]),
    # Siblings that see each other.
    "depth_1": plain([STAR, STAR]),
    # Rows, mask bits or pages handed to another request; bytes of one request's bits running into the next.
    "ragged_with_padding": plain([PADDING, random_tree(17, 9), PADDING, LEVEL, random_tree(63, 3)], num_spare_rows=2),
    # Mask rows taken for rows of the flat batch: here they differ by the ancestors that are no rows.
    "drafted_level": plain([LEVEL, LEVEL]),
    # Last pages counted from another end, blocks that begin in the page the prefix ends in.
    "page_size_1": page_boundaries(1),
    "page_size_16": page_boundaries(16),
    "page_size_64": page_boundaries(64),
    # A part without any keys, alone and beside others with some.
    "no_prefix": plain([random_tree(0, 5), STAR]),
    "no_prefixes": plain([random_tree(0, 5), random_tree(0, 2)]),
    # A planner that divides by no requests, or launches nothing.
    "empty_batch": nobody(0),
    "only_padding": nobody(2),
    # Padding requests whose lengths are left over from a longer batch.
    "stale_padding": stale_padding,
    # Words of 64 bits in a mask that has none, and blocks above them.
    "64_nodes": plain([random_tree(20, 64)]),
    "130_nodes": plain([random_tree(20, 130), random_tree(3, 65)]),
    # Chunks that see their future; a diagonal that starts at another request's prefix.
    "causal": plain(CHUNKS, is_causal=True, num_spare_rows=2),
    # NaN that crosses from one request's keys to another's rows, or is swept under.
    "nan_logits": poisoned_neighbour,
    # Sums of one part that swallow the other's, or overflow on the way: logits of ± 60.
    "peaked": with_keys_scaled(20.0),
    # Head dim, group and type that do not reach the plan.
    "head_dim_128": plain(TREES, head_dim=128, group=4),
    "head_dim_256": plain(TREES, head_dim=256, group=1),
    "bfloat16": plain(TREES, dtype=torch.bfloat16),
    # Options that do not reach the sums; sinks counted in nats instead of bits.
    "scale_and_softcap": with_options(AttentionOptions(scale=0.4, softcap=0.7), TREES),
    "sinks": with_options(AttentionOptions(sinks=torch.linspace(-2.0, 6.0, 4)), TREES),
    "causal_sinks": with_options(AttentionOptions(sinks=torch.linspace(-2.0, 6.0, 4)), CHUNKS, is_causal=True),
    # A window one key too long; the library counts the keys before the row.
    "causal_window": with_options(AttentionOptions(window=4), CHUNKS, is_causal=True),
    # A plan for one kind of layer that answers for another.
    "alternating_layers": alternating_layers,
    # A wrapper planned for a group of rows while another group of the step still needs its plan.
    "trees_beside_chunks": trees_beside_chunks,
    # A wrapper of an earlier step that keeps its mask or its lengths.
    "step_after_step": step_after_step,
}

MASKED_CHECKS: dict[str, Callable[[Backend], None]] = {
    # Windows counted in places, where siblings share a position; windows within the block, at its edge, past it.
    "window_1": with_options(AttentionOptions(window=1), TREES),
    "window_3": with_options(AttentionOptions(window=3), [TWINS, *TREES, PADDING]),
    "window_12": with_options(AttentionOptions(window=12), [TWINS, *TREES]),
}

CASES = [
    ParityCase("attention", name, regime, partial(check, backend))
    for name, backend, checks in (
        ("flashinfer", MaskedFlashInfer, CHECKS | MASKED_CHECKS),
        ("flashinfer-cascade", CascadeFlashInfer, CHECKS),
    )
    for regime, check in checks.items()
]
