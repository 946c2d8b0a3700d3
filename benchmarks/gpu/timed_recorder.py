"""A recorder of steps that knows how long the device works on each replay."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from eyas.workers.graphs import Recorder


class TimedRecorder:
    """`Recorder` that puts a pair of CUDA events around every replay; on a CPU it reads the clock."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event] | float] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = self._recorder.record(run)

        def timed() -> None:
            if self._device.type == "cpu":
                start = time.perf_counter()
                replay()
                self._spans.append((time.perf_counter() - start) * 1e3)
                return
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            replay()
            after.record()
            self._spans.append((before, after))

        return timed

    def take_ms(self) -> float:
        """Time on the device of all replays since the last call; waits for them."""
        spans, self._spans = self._spans, []
        total = 0.0
        for span in spans:
            if isinstance(span, float):
                total += span
            else:
                before, after = span
                after.synchronize()
                total += before.elapsed_time(after)
        return total
