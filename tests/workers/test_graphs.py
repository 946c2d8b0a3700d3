"""The recorder of CUDA graphs over a double of torch's calls: what is captured does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.workers.graphs import CudaGraphRecorder

Work = Callable[[], None]


class FakeGraph:
    """What was launched while it was captured."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def replay(self) -> None:
        for work in self.work:
            work()


class FakeCuda:
    """A device that does its work at once, or keeps it for a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._captures: FakeGraph | None = None

        @contextmanager
        def graph(graph: FakeGraph, **_: Any) -> Iterator[None]:
            self._captures = graph
            yield
            self._captures = None

        @contextmanager
        def stream(_: Any) -> Iterator[None]:
            yield

        waiting = SimpleNamespace(wait_stream=lambda other: None)
        doubles = {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda device: waiting,
            "current_stream": lambda device: waiting,
            "stream": stream,
            "synchronize": lambda device: None,
            "CUDAGraph": FakeGraph,
            "graph": graph,
        }
        for name, double in doubles.items():
            monkeypatch.setattr(torch.cuda, name, double)

    def launch(self, work: Work) -> None:
        if self._captures is not None:
            self._captures.work.append(work)
        else:
            work()


def test_what_was_recorded_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second recording that warms up over the unwritten memory of the first: as indices it ends the
    process."""
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder(torch.device("cuda"))
    made: list[dict[str, int]] = []
    read: list[int | None] = []

    def make() -> None:
        result: dict[str, int] = {}
        made.append(result)
        cuda.launch(lambda: result.update(value=7))

    def use() -> None:
        result = made[-1]
        cuda.launch(lambda: read.append(result.get("value")))

    recorder.record(make)
    replay = recorder.record(use)
    assert set(read) == {7}
    count = len(read)
    replay()
    assert read[count:] == [7]
