"""How long the device works on something: medians of repeats, by CUDA events on a GPU and by the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

# Repeats end when they have taken this long, so that slow points do not eat the check's time.
BUDGET_MS = 400.0
MIN_REPEATS = 5
MAX_REPEATS = 50
WARMUP = 2


def device_ms(run: Callable[[int], object], device: torch.device) -> float:
    """Median time of `run(repeat)` on the device, launch gaps included.

    Args:
        run: is told the number of the repeat, so that it can turn over its inputs and find no cache warm.
    """
    return median_ms(lambda repeat: _on_device_ms(partial(run, repeat), device))


def wall_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median time of `run` as the host sees it, until the device has done its part."""
    return median_ms(lambda _: _on_host_ms(run, device))


def median_ms(measure: Callable[[int], float]) -> float:
    """Median of what `measure(repeat)` returns, after runs that are not counted, within the budget."""
    for repeat in range(WARMUP):
        measure(repeat)
    times: list[float] = []
    while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and sum(times) < BUDGET_MS):
        times.append(measure(WARMUP + len(times)))
    return statistics.median(times)


def busy_ms(run: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Mean of the durations of all kernels and copies of `run`, added up: what the device works, without any gap.

    From the profiler, whose hooks slow the host down; on a CPU it adds up operators instead.
    """
    on_cpu = device.type == "cpu"
    run()
    _synchronise(device)
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity], acc_events=True) as profiled:
        for _ in range(repeats):
            run()
        _synchronise(device)
    field = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    return float(sum(getattr(event, field) for event in profiled.key_averages())) / 1e3 / repeats


def copy_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes read plus bytes written per second by a copy within the device's memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / (device_ms(lambda _: target.copy_(source), device) / 1e3)


def _on_device_ms(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        return _on_host_ms(run, device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def _on_host_ms(run: Callable[[], object], device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    run()
    _synchronise(device)
    return (time.perf_counter() - start) * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
