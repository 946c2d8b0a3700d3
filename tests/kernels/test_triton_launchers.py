"""Launchers of the tree operations: what they refuse, and that they look at shapes alone.

A captured graph replays what was launched; a launcher that read a value would freeze it or stop the capture. Tensors on
the meta device have no values, so a launcher that gets by with them reads none. Kernels do not run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.kernels import triton_build, triton_compact, triton_grow, triton_select, triton_verify
from eyas.kernels.build import MaskEncoding, TreeLinks
from eyas.kernels.grow import Frontier, TreeGrowth
from eyas.kernels.tree import DraftTrees

META = torch.device("meta")


class Launches:
    """Stands for a kernel: counts launches, each being `kernel[grid](arguments)`."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


def replaced(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str) -> Launches:
    launches = Launches()
    monkeypatch.setattr(module, kernel, launches)
    return launches


def ints(*shape: int, device: torch.device = META) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


def frontier(width: int = 4) -> Frontier:
    return Frontier(ints(3, width), torch.empty(3, width, device=META), ints(3, width), ints(3, width))


def test_build_launches_one_program_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mask sized by values, and a prefix allocated for who does not read it."""
    launches = replaced(monkeypatch, triton_build, "_build_kernel")
    num_bytes = {}
    for encoding in MaskEncoding:
        max_keys = 32_776 if encoding is MaskEncoding.FULL else None
        mask = triton_build.build_layout(ints(256, 8), ints(256), ints(256), encoding, max_keys).mask
        num_bytes[encoding] = mask.numel() * mask.element_size()
    assert launches.grids == [(256,)] * 3
    assert num_bytes == {
        MaskEncoding.FULL: 67_125_248,
        MaskEncoding.TREE_ONLY: 16_384,
        MaskEncoding.PACKED: 2_048,
    }


def test_verify_launches_one_program_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a path sized by the node count."""
    launches = replaced(monkeypatch, triton_verify, "_verify_kernel")
    trees = DraftTrees(ints(5, 64), ints(5, 64), ints(5))
    accepted = triton_verify.verify_walk(trees, TreeLinks(ints(5, 64), ints(5, 64)), ints(5, 64), draft_depth=6)
    assert accepted.path.shape == (5, 7)
    assert launches.grids == [(5,)]


def test_compact_launches_once_for_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a launch per layer, or per request."""
    launches = replaced(monkeypatch, triton_compact, "_compact_kernel")
    caches = torch.empty(64, 1000, 8, 128, dtype=torch.bfloat16, device=META)
    triton_compact.compact(caches, ints(5, 8), ints(5, 8))
    assert len(launches.grids) == 1
    assert launches.grids[0][:2] == (5, 64)


def test_growth_launches_one_program_per_request_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft loop that stops to look at a score or a budget."""
    expand = replaced(monkeypatch, triton_grow, "_expand_kernel")
    select = replaced(monkeypatch, triton_select, "_select_kernel")
    growth = TreeGrowth(4, triton_grow.OPERATIONS)
    growth.start(ints(3, 4), torch.empty(3, 4, device=META))
    for _ in range(2):
        growth.expand(ints(3, 4, 4), torch.empty(3, 4, 4, device=META))
    assert growth.finish(ints(3), ints(3), max_nodes=16).trees.parents.shape == (3, 16)
    assert (expand.grids, select.grids) == ([(3,)] * 2, [(3,)])


CPU = torch.device("cpu")
POOL = torch.empty(4, 20, 2, 8, device=META)
TREES = DraftTrees(ints(3, 8), ints(3, 8), ints(3))
LINKS = TreeLinks(ints(3, 8), ints(3, 8))
SCORES = torch.empty(3, 9, device=META)
EDGES = torch.empty(3, 4, 4, device=META)


def build(parents: Tensor, counts: Tensor) -> object:
    return triton_build.build_layout(parents, counts, ints(3), MaskEncoding.PACKED)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda: build(ints(3), ints(3)), r"parents: expected \[B, N\] with at least one node, got \[3\]"),
        (lambda: build(ints(3, 8).int(), ints(3)), r"parents: expected torch.int64 \[3, 8\].*got torch.int32"),
        (lambda: build(ints(8, 3).T, ints(3)), r"parents: expected contiguous, got strides \[1, 3\]"),
        (lambda: build(ints(3, 8), ints(4)), r"num_nodes: expected torch.int64 \[3\].*got torch.int64 \[4\]"),
        (lambda: build(ints(3, 8), ints(3, device=CPU)), r"num_nodes: expected .* on meta, got .* on cpu"),
        (
            lambda: triton_build.build_layout(ints(3, 8), ints(3), ints(3), MaskEncoding.FULL),
            "a full mask needs max_keys",
        ),
        (lambda: triton_verify.verify_walk(TREES, LINKS, ints(3, 8), -1), "draft_depth: expected at least 0, got -1"),
        (lambda: triton_verify.verify_walk(TREES, LINKS, ints(3, 7), 2), r"target_tokens: expected .*\[3, 8\]"),
        (lambda: triton_verify.verify_walk(TREES, TreeLinks(ints(8, 3).T, ints(3, 8)), ints(3, 8), 2), "first_child: "),
        (lambda: triton_compact.compact(POOL, ints(2, 3), ints(2, 2)), "6 source slots for 4 destinations"),
        (lambda: triton_compact.compact(POOL, ints(1, 2, 3), ints(1, 2, 3)), r"expected \[B, A\] or \[M\]"),
        (lambda: triton_compact.compact(POOL, ints(65), ints(65)), "expected at most 64 rows of one request, got 65"),
        (lambda: triton_compact.compact(POOL.double(), ints(2), ints(2)), r"caches: expected \[C, S, ...\] in"),
        (lambda: triton_compact.compact(POOL.transpose(0, 1), ints(2), ints(2)), "caches: expected contiguous"),
        (lambda: triton_compact.compact(POOL, ints(2).int(), ints(2).int()), "source_slots: expected torch.int64"),
        (
            lambda: triton_grow.expand_level(frontier(33), ints(3, 33, 33), torch.empty(3, 33, 33, device=META), 1),
            "width: expected at most 32, got 33",
        ),
        (lambda: triton_grow.expand_level(frontier(), ints(3, 4, 5), EDGES, 1), r"tokens: expected int64 \[3, 4, 4\]"),
        (
            lambda: triton_grow.expand_level(frontier(), ints(3, 4, 4), EDGES.double(), 1),
            r"log_probs: expected \[3, 4, 4\].*got torch.float64",
        ),
        (
            lambda: triton_select.select_within(ints(3), ints(3, 5000), ints(3, 5000), SCORES, ints(3), 8),
            r"expected \[B, P\] of 1 to 4096 candidates for as many nodes, got \[3, 5000\] for 8",
        ),
        (
            lambda: triton_select.select_within(ints(3), ints(3, 9), ints(3, 9), SCORES.half(), ints(3), 8),
            "scores: expected torch.float32",
        ),
        (
            lambda: triton_select.select_within(ints(3), ints(3, 9), ints(3, 9), SCORES, ints(3), 0),
            "max_nodes must be at least 1",
        ),
    ],
)
def test_layouts_the_kernels_cannot_read_are_refused(launch: Callable[[], object], message: str) -> None:
    """Catches tensors whose addresses a kernel would get wrong, silently."""
    with pytest.raises(ValueError, match=message):
        launch()
