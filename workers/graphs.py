"""Recording a step's device work once and replaying it: CUDA graphs, and the form of them that any device can run.

What is recorded reads and writes buffers whose addresses stay, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_WARM_UP_RUNS = 2  # compiles kernels and lets libraries allocate their workspaces, neither possible while recording


Progress = Callable[[int, int], None]
"""Told how many recordings of how many are done."""


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


class Recorder(Protocol):
    """Turns device work into something that can be run again at once."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run`, which must be harmless on the buffers as they are, and return what repeats it."""
        ...


class EagerRecorder:
    """Repeats work by doing it again: what `--eager` means, and how the recorded paths are tested without a GPU."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


class CudaGraphRecorder:
    """Records CUDA graphs into one memory pool, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        # Capturing runs nothing: what it made holds whatever was in the pool, and the next recording may read it.
        graph.replay()
        return graph.replay


def recorder_for(device: torch.device) -> Recorder:
    """What records on this device."""
    return CudaGraphRecorder(device) if device.type == "cuda" else EagerRecorder()
