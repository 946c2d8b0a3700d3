"""The offline engine in one process: pools of the size that its memory allows."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.deployments import local_engine
from eyas.deployments.settings import EngineSettings
from eyas.workers.loading import EngineSpec
from eyas.workers.local import LocalWorkers
from eyas.workers.memory import MemoryReport


def test_both_pools_fit_the_measured_memory(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that takes all the memory of the GPU on which the drafter lives too."""
    page_bytes = []

    def measure(device: object, num_bytes: int) -> MemoryReport:
        page_bytes.append(num_bytes)
        return MemoryReport("a", 1 << 20, 1 << 21, num_bytes)

    monkeypatch.setattr(local_engine, "measure", measure)
    target = tiny_models.target()
    head = str(tiny_models.head(target))
    spec = EngineSpec(str(target), head, "float32", "cpu", None, 4, num_threads=1, gpu_memory_fraction=0.75)
    with local_engine._open_workers(spec, EngineSettings(head=head, model=str(target)), None) as (workers, num_pages):
        assert isinstance(workers, LocalWorkers)
        assert page_bytes == [4 * 4 * 2 * 2 * 8 * 4 + 4 * 1 * 2 * 2 * 8 * 4]  # page, layers, K and V, heads, dim, bytes
        assert num_pages == (1 << 19) // page_bytes[0] - 1
        assert workers.target.layout.num_pages == num_pages
        assert workers.drafter.layout.num_pages == num_pages  # type: ignore[union-attr]
