"""Parity of attention over paged rows with `ReferenceAttention`, and of some regimes with softmax in float64.

Every scene's pool is NaN but for what its requests own, spare rows and pages included, and its queries are cut from a
fused projection: whatever reads past its own shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from attention_scene import PADDING, Request, Scene, chain, random_tree
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.kernels.triton_attention import TritonAttention
from eyas.kernels.triton_attention_tiling import MIN_SPLIT_KEYS

# Means of values of size 1 to 4. float32 differs by the order of its sums. Half types round the weights and the result
# once each, in the reference the scores as well; the interpreter cuts bfloat16 off where devices round to the nearest.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
MANY_PROGRAMS = 1000  # as many splits as there are keys for
LONG = 3 * MIN_SPLIT_KEYS + 37

Check = Callable[[], None]
CASES: list[ParityCase] = []


def regime(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES.append(ParityCase("attention", "triton", name, check))
        return check

    return add


def make_scene(requests: list[Request], **options: Any) -> Scene:
    return Scene(requests, device=DEVICE, **options)


def triton_attended(scene: Scene, options: AttentionOptions, num_programs: int | None, **changes: Any) -> Tensor:
    plan = TritonAttention(scene.geometry, num_programs).plan(scene.rows(MaskEncoding.PACKED, **changes))
    return plan(scene.query, scene.key_cache, scene.value_cache, options)[: scene.num_rows]


def agree(
    scene: Scene, options: AttentionOptions = PLAIN_ATTENTION, num_programs: int | None = None, **changes: Any
) -> None:
    """`changes` replace fields of the plan's rows."""
    tolerance = TOLERANCE[scene.geometry.dtype]
    out = triton_attended(scene, options, num_programs, **changes)
    plan = ReferenceAttention(scene.geometry).plan(scene.rows(MaskEncoding.FULL))
    expected = plan(scene.query, scene.key_cache, scene.value_cache, options)[: scene.num_rows]
    torch.testing.assert_close(out, expected, rtol=0.0, atol=tolerance)


def agree_with_float64(
    scene: Scene, options: AttentionOptions = PLAIN_ATTENTION, num_programs: int | None = None
) -> None:
    tolerance = TOLERANCE[scene.geometry.dtype]
    out = triton_attended(scene, options, num_programs)
    torch.testing.assert_close(out.double().cpu(), scene.expected(options), rtol=0.0, atol=tolerance)


@regime("pages")
def check_pages() -> None:
    """Catches places looked up on another page, and the lookup of one page per tile where a tile spans several."""
    for page_size in (1, 16, 24, 64):
        agree(
            make_scene([random_tree(prefix, 6, seed=prefix) for prefix in (0, 1, 15, 17, 63, 64)], page_size=page_size)
        )


@regime("prefix boundaries")
def check_prefix_boundaries() -> None:
    """Catches a tile of keys counted twice or not at all where the whole tiles of the prefix end."""
    agree_with_float64(make_scene([random_tree(prefix, 3) for prefix in (0, 15, 16, 17, 31, 32, 33)]))


@regime("ragged")
def check_ragged() -> None:
    """Catches rows of one request written over another's, and padding requests that shift or write any."""
    trees = [PADDING, random_tree(20, 9), PADDING, random_tree(0, 1), random_tree(33, 17), PADDING]
    agree(make_scene(trees, num_spare_rows=3))


@regime("one node")
def check_one_node() -> None:
    """Catches a tree of the root alone, which is plain decoding, missing its own key or the prefix."""
    agree_with_float64(make_scene([random_tree(0, 1), random_tree(40, 1)], group=1))


@regime("width one")
def check_width_one() -> None:
    """Catches a chain that attends differently as a tree and as causal rows."""
    for is_causal in (False, True):
        agree(make_scene([chain(19, 8), chain(0, 5)], is_causal=is_causal))


@regime("depth one")
def check_depth_one() -> None:
    """Catches siblings that see each other."""
    agree(make_scene([Request(5, [-1] + [0] * 11)]))


@regime("mask words")
def check_mask_words() -> None:
    """Catches each width of word read as another, and bits taken from the next row's word."""
    for num_nodes in (8, 9, 16, 17, 32, 33):
        agree(make_scene([random_tree(3, num_nodes), random_tree(18, 2)], group=1, num_kv_heads=1))


@regime("64 nodes")
def check_64_nodes() -> None:
    """Catches the last bit of the widest word taken for a sign, and shifts by a whole word."""
    agree(make_scene([random_tree(0, 64), random_tree(5, 64)], group=1, num_kv_heads=1))


@regime("65 nodes")
def check_65_nodes() -> None:
    """Catches the second word of a row, and tiles whose bits come from two words."""
    agree(make_scene([random_tree(7, 65)], group=1, num_kv_heads=1))


@regime("130 nodes")
def check_130_nodes() -> None:
    """Catches words past the second, in half precision too, whose tiles take bits from a word's upper half."""
    agree(make_scene([random_tree(41, 130)], group=1, num_kv_heads=1))
    agree(make_scene([random_tree(41, 130)], group=1, num_kv_heads=1, dtype=torch.float16))


@regime("unseen tiles")
def check_unseen_tiles() -> None:
    """Catches NaN from rows that see nothing of their first tiles, or of a whole split."""
    levels = Request(0, [-1] * 40, num_rows=10)
    agree_with_float64(make_scene([levels, random_tree(0, 20)]))
    options = AttentionOptions(window=8, sinks=torch.linspace(-1.0, 1.0, 4, device=DEVICE))
    agree(make_scene([random_tree(LONG, 5)]), options, MANY_PROGRAMS, max_prefix=4096)


@regime("draft levels")
def check_draft_levels() -> None:
    """Catches rows taken for the first places of their block: a level's rows are its last ones."""
    agree(make_scene([Request(5, [-1, -1, 0, 0, 1, 2, 3, 4], 3), Request(30, [-1, -1, 1, 1, 0, 3, 2, 4], 3)]))


@regime("heads")
def check_heads() -> None:
    """Catches query heads paired with another key head, and groups that are no power of two."""
    for group, num_kv_heads in ((1, 3), (3, 2), (8, 1), (5, 2)):
        agree(make_scene([random_tree(9, 7), random_tree(3, 4)], group=group, num_kv_heads=num_kv_heads))


@regime("head dims")
def check_head_dims() -> None:
    """Catches dims that are no power of two reading or summing their neighbours' values."""
    for head_dim in (8, 64, 80, 96, 128, 256):
        agree(make_scene([random_tree(20, 4)], head_dim=head_dim, num_kv_heads=2, group=1))


@regime("half types")
def check_half_types() -> None:
    """Catches scores or sums kept in half precision, by a prefix whose many small weights would vanish."""
    for dtype in (torch.float16, torch.bfloat16):
        agree_with_float64(make_scene([random_tree(130, 9), random_tree(3, 4)], dtype=dtype, head_dim=80, group=1))
        agree_with_float64(make_scene([chain(70, 9), chain(3, 4)], dtype=dtype, is_causal=True, num_kv_heads=1))
        agree(make_scene([random_tree(LONG, 5)], dtype=dtype, num_kv_heads=1), num_programs=MANY_PROGRAMS)


@regime("splits")
def check_splits() -> None:
    """Catches ranges of keys that overlap or leave a gap, and splits without keys whose output is merged."""
    requests = [random_tree(LONG, 5), PADDING, random_tree(0, 4), random_tree(MIN_SPLIT_KEYS, 3)]
    scene = make_scene(requests, group=2, num_kv_heads=1)
    agree(scene, num_programs=MANY_PROGRAMS)
    agree_with_float64(scene, num_programs=2 * len(requests))  # two splits


@regime("bounds beyond lengths")
def check_bounds_beyond_lengths() -> None:
    """Catches a captured launch, sized for the longest, that needs its bounds to be exact."""
    scene = make_scene([random_tree(50, 5), PADDING, random_tree(2, 3)], num_spare_rows=2, num_kv_heads=1)
    mask = scene.rows(MaskEncoding.PACKED).mask
    padded = torch.nn.functional.pad(mask.view(torch.int8), (0, 0, 0, 4), value=-1).view(torch.uint8)
    agree(scene, num_programs=MANY_PROGRAMS, mask=padded, max_rows=9, max_prefix=1024)


@regime("causal")
def check_causal() -> None:
    """Catches the diagonal: a row that sees its future, and tiles taken for seen by all that are not."""
    agree_with_float64(
        make_scene([chain(0, 1), chain(21, 40), PADDING, chain(0, 33)], is_causal=True, num_spare_rows=1)
    )
    scene = make_scene([chain(2 * MIN_SPLIT_KEYS, 20)], is_causal=True, num_kv_heads=1, group=3)
    agree(scene, num_programs=MANY_PROGRAMS)


@regime("options")
def check_options() -> None:
    """Catches a scale, cap or sink that does not reach the sums, or reaches those of another head."""
    sinks = torch.linspace(-2.0, 2.0, 4, device=DEVICE)
    for options in (
        AttentionOptions(scale=0.9),
        AttentionOptions(softcap=0.7),
        AttentionOptions(sinks=sinks),
        AttentionOptions(scale=0.9, softcap=0.7, sinks=sinks.half()),
    ):
        agree_with_float64(make_scene([random_tree(20, 6), random_tree(3, 2)]), options)
    scene = make_scene([random_tree(2 * MIN_SPLIT_KEYS, 5), random_tree(3, 4)])
    agree(scene, AttentionOptions(softcap=0.7, sinks=sinks), MANY_PROGRAMS)


@regime("windows")
def check_windows() -> None:
    """Catches windows that are a position off, count places instead of positions, or drop tiles that a row sees."""
    requests = [random_tree(40, 9), random_tree(2, 6), Request(17, [-1, -1, 0, 0, 1, 2], 2)]
    for window in (1, 3, 8, 20, 100):
        agree(make_scene(requests, num_kv_heads=1), AttentionOptions(window=window))
    for window in (3, 30):
        scene = make_scene([chain(20, 30), chain(0, 9)], is_causal=True, num_kv_heads=1)
        agree(scene, AttentionOptions(window=window))
    agree(make_scene([random_tree(LONG, 5)], num_kv_heads=1), AttentionOptions(window=300), MANY_PROGRAMS)


@regime("NaN")
def check_nan() -> None:
    """Catches a NaN hidden by a mask or a maximum, and one that reaches other rows."""
    for num_programs in (1, MANY_PROGRAMS):
        scene = make_scene([random_tree(2 * MIN_SPLIT_KEYS, 4), random_tree(3, 2)])
        scene.query[2, 1, 0] = torch.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter remarks on the maximum of NaN alone
            out = triton_attended(scene, PLAIN_ATTENTION, num_programs)
        assert bool(out[2, 1].isnan().all())
        scene.query[2, 1, 0] = 0.0
        same = triton_attended(scene, PLAIN_ATTENTION, num_programs)
        out[2, 1] = same[2, 1]
        assert torch.equal(out, same)


@regime("empty batch")
def check_empty_batch() -> None:
    """Catches a launch over a grid of nothing."""
    for requests in ([], [PADDING, PADDING]):
        for is_causal in (False, True):
            agree(make_scene(requests, is_causal=is_causal))
