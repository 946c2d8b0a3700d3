"""Starting the ranks of one machine, each in a process of its own, and ending all of them when one dies."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from eyas.training.child_process import end_with_parent
from eyas.training.ranks import Ranks, joined_ranks

_GRACE_S = 5.0


def run_in_processes(work: Callable[[Ranks], Any], num_ranks: int, device: str, num_threads: int) -> Any:
    """What `work` returns in rank 0; it runs in `num_ranks` new processes, and must be picklable, as its result.

    Args:
        device: cpu, or cuda, where rank i takes the GPU i.
        num_threads: of all ranks together; each gets an equal part, at least one.

    Raises:
        ValueError: if a rank refuses its arguments so.
        ChildProcessError: if a rank fails or is killed. The others are ended first.
    """
    threads_each = max(1, num_threads // num_ranks)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="eyas-ranks-") as name:
        folder = Path(name)
        processes: list[BaseProcess] = [
            spawn.Process(
                target=_run_rank, args=(rank, num_ranks, device, threads_each, folder, work), name=f"rank {rank}"
            )
            for rank in range(num_ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait_for_all(processes, folder)
        finally:
            _end(processes)
        return pickle.loads((folder / "result").read_bytes())


def _run_rank(rank: int, size: int, device: str, num_threads: int, folder: Path, work: Callable[[Ranks], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key press reaches all processes; the first one ends the others
    end_with_parent()
    torch.set_num_threads(num_threads)
    own = torch.device("cuda", rank) if device == "cuda" else torch.device(device)
    try:
        with joined_ranks(rank, size, own, folder / "meeting") as ranks:
            result = work(ranks)
    except Exception as error:
        if isinstance(error, ValueError):
            (folder / f"refusal-{rank}").write_text(str(error))
        else:
            traceback.print_exc()
        os._exit(1)  # what else runs here, such as the watchdog of NCCL, must not keep it alive
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


def _wait_for_all(processes: list[BaseProcess], folder: Path) -> None:
    while True:
        running = [process.sentinel for process in processes if process.is_alive()]
        # Looked at after the above: a rank that dies in between is still among those waited for.
        if not running or any(process.exitcode for process in processes):
            break
        wait(running)
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if not failed:
        return
    refusals = sorted(folder.glob("refusal-*"))
    if refusals:
        raise ValueError(refusals[0].read_text())
    # A rank whose peer is gone fails because of that: one that was killed is the cause.
    rank = next((rank for rank in failed if (processes[rank].exitcode or 0) < 0), failed[0])
    code = processes[rank].exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed; its error is above"
    raise ChildProcessError(
        f"rank {rank} of {len(processes)} {how}. The other ranks were ended; start again with the same arguments to go "
        "on from the last checkpoint"
    )


def _end(processes: list[BaseProcess]) -> None:
    alive = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
