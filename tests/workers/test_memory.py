"""The number of KV pages that GPUs can hold, from measurements that are given instead of taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.models.parallel import TensorParallel
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.loading import EngineSpec, load_draft_head, load_target_model
from eyas.workers.memory import (
    MemoryReport,
    agree_num_pages,
    head_page_bytes,
    limit_process,
    measure,
    release_cached,
    target_page_bytes,
)

MIB = 1 << 20
GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def report(gpu: str = "GPU-a", free: int = 60 * GIB, total: int = 80 * GIB, page: int = 2 * MIB) -> MemoryReport:
    return MemoryReport(gpu, free, total, page)


def pool_bytes(layout: PoolLayout, num_layers: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    pool = KVPool(layout, num_layers, kv_heads, head_dim, torch.float32, CPU, value_dim)
    return sum(block.numel() * block.element_size() for block in pool.blocks)


def test_page_bytes_are_what_pools_allocate(tiny_models: Any) -> None:
    """A formula that forgets the values, a rank's share of the heads, or the page size."""
    target = tiny_models.target(num_key_value_heads=2)
    spec = EngineSpec(str(target), str(tiny_models.head(target)), "float32", "cpu", 8, 4, num_threads=1)
    for size in (1, 2):
        model = load_target_model(spec, TensorParallel(0, size))
        config = model.config
        small, large = (
            pool_bytes(
                PoolLayout(num_pages, 4), config.num_layers, config.num_kv_heads // size, config.head_dim,
                config.value_head_dim,
            )
            for num_pages in (5, 7)
        )  # fmt: skip
        assert target_page_bytes(model, 4) == (large - small) // 2
    head = load_draft_head(spec)
    assert head is not None
    assert head.cache is not None
    cache = head.cache
    small, large = (
        pool_bytes(PoolLayout(num_pages, 4), cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.value_head_dim)
        for num_pages in (5, 7)
    )
    assert head_page_bytes(head, 4) == (large - small) // 2


def test_a_head_without_attention_takes_no_pages() -> None:
    """A Medusa head that halves the pool for a cache it does not have."""
    head: Any = SimpleNamespace(cache=None)
    assert head_page_bytes(head, 16) == 0


def test_what_is_left_after_the_reserve_is_pages() -> None:
    """A reserve taken from the free memory, which shrinks as weights grow, instead of from the GPU's."""
    pages = agree_num_pages(None, [report()], 0.9, 1)
    assert pages == (60 * GIB - 8 * GIB) // (2 * MIB) - 1


def test_a_shared_gpu_holds_both_pools() -> None:
    """The drafter's pool forgotten, so that it finds no memory, or a GPU counted twice."""
    reports = [report(page=3 * MIB), report(free=59 * GIB, page=1 * MIB)]
    assert agree_num_pages(None, reports, 0.9, 1) == (59 * GIB - 8 * GIB) // (4 * MIB) - 1


def test_the_fullest_gpu_decides() -> None:
    """Page numbers that one of the ranks has no memory for."""
    reports = [report("GPU-a"), report("GPU-b", free=30 * GIB), report("GPU-a", page=MIB)]
    assert agree_num_pages(None, reports, 0.9, 1) == (30 * GIB - 8 * GIB) // (2 * MIB) - 1


def test_a_given_number_is_used_as_it_is() -> None:
    """A setting overridden by a measurement."""
    assert agree_num_pages(100, [report(), report("GPU-b")], 0.9, 1) == 100
    assert agree_num_pages(1024, [None, None], 0.9, 1) == 1024


@pytest.mark.parametrize(
    ("asked", "free", "message"),
    [
        (
            None,
            8 * GIB + 9 * MIB,
            r"^gpu_memory_fraction: one request needs at least 10\.0 MiB for KV pages on GPU GPU-a, which has 9\.0 MiB "
            r"left for them: 8201\.0 MiB are free after loading the weights, and gpu_memory_fraction=0\.9 keeps "
            r"8192\.0 MiB for activations and CUDA graphs; use more target ranks, raise gpu_memory_fraction, or free",
        ),
        (None, 1 * GIB, r"which has 0\.0 MiB left"),
        (
            30_000,
            60 * GIB,
            r"^num_pages: num_pages=30000 needs 60002\.0 MiB .* which has 53248\.0 MiB .*; lower num_pages, raise",
        ),
    ],
)
def test_too_little_memory_is_refused_with_the_figures(asked: int | None, free: int, message: str) -> None:
    """A CUDA out-of-memory error from the middle of an allocation, or an engine without a page to give."""
    with pytest.raises(ValueError, match=message):
        agree_num_pages(asked, [report(free=free)], 0.9, min_pages=4)


def test_the_least_that_fits_passes() -> None:
    """A refusal that is off by one page."""
    assert agree_num_pages(None, [report(free=8 * GIB + 10 * MIB)], 0.9, min_pages=4) == 4


def test_without_a_gpu_a_number_must_be_given() -> None:
    """An empty list of measurements taken for unlimited memory."""
    with pytest.raises(ValueError, match="num_pages: must be given"):
        agree_num_pages(None, [None], 0.9, 1)


def test_a_cpu_is_neither_measured_nor_limited() -> None:
    """CUDA initialised in a process that has none."""
    assert measure(CPU, 7) is None
    release_cached(CPU)
    limit_process(CPU, 10, 7, 0.9)


class FakeCuda:
    """The memory calls of `torch.cuda`."""

    def __init__(self) -> None:
        self.limits: list[tuple[float, int | None]] = []
        self.num_emptied = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 60 * GIB, 80 * GIB

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid="a")

    def memory_reserved(self, device: torch.device) -> int:
        return 16 * GIB

    def set_per_process_memory_fraction(self, fraction: float, device: int | None) -> None:
        self.limits.append((fraction, device))

    def empty_cache(self) -> None:
        self.num_emptied += 1


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_a_gpu_is_measured(fake_cuda: FakeCuda) -> None:
    """Memory of the process taken for that of the GPU, which its neighbour uses too."""
    release_cached(GPU)
    assert fake_cuda.num_emptied == 1
    assert measure(GPU, 7) == MemoryReport("a", 60 * GIB, 80 * GIB, 7)


@pytest.mark.parametrize(("num_pages", "share"), [(8191, 0.2 + 0.2 + 0.1), (1 << 20, 1.0)])
def test_a_process_may_take_its_own_part_and_the_reserve(fake_cuda: FakeCuda, num_pages: int, share: float) -> None:
    """A drafter that outgrows its part and takes the memory of the target beside it."""
    limit_process(GPU, num_pages, 2 * MIB, 0.9)
    ((found, device),) = fake_cuda.limits
    assert found == pytest.approx(share)
    assert device == 0
