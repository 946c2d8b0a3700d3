"""Where `eyas train KIND` trains: on which device, in how many processes, on this machine or a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.training.rank_processes import run_in_processes
from eyas.training.ranks import Ranks


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options that `run_ranks` reads, next to `--threads` and `--work-dir`."""
    group = parser.add_argument_group("ranks", "processes that train together, each on a batch of its own every step")
    add_device_option(group)
    number = group.add_mutually_exclusive_group()
    number.add_argument(
        "--ranks", type=int, default=1, help="on this machine; on cuda each takes a GPU, on cpu a part of --threads"
    )
    number.add_argument(
        "--ray-workers", type=int,
        help="on a Ray cluster, started by Ray Train; every node must see the target, --work-dir and --corpus by the "
        "same paths",
    )  # fmt: skip
    group.add_argument(
        "--gpus-per-worker", type=int, choices=[0, 1], default=0, help="of a Ray worker; with 1 it trains on cuda"
    )
    group.add_argument("--ray-address", help="join this Ray cluster instead of starting Ray here")


def add_device_option(options: argparse._ActionsContainer) -> None:
    """Add `--device`, which `check_device` checks, to a parser or a group."""
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what to train on")


def check_device(device: str) -> int:
    """Number of GPUs torch sees for `--device`; `ValueError` if that is cuda and there are none."""
    if device != "cuda":
        return 0
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        raise ValueError("--device: torch sees no CUDA device on this machine; use --device cpu")
    return num_gpus


def check_ranks(args: argparse.Namespace) -> None:
    """Find before anything is written what cannot work.

    Raises:
        ValueError: naming option and remedy.
    """
    if args.ray_workers is None:
        if args.gpus_per_worker or args.ray_address is not None:
            raise ValueError("--gpus-per-worker and --ray-address: are for Ray workers; add --ray-workers N")
        if args.ranks < 1:
            raise ValueError(f"--ranks: must be at least 1, got {args.ranks}")
        num_gpus = check_device(args.device)
        if args.device == "cuda" and args.ranks > num_gpus:
            raise ValueError(f"--ranks: {args.ranks} ranks need a GPU each, torch sees {num_gpus}; give fewer")
        return
    if args.ray_workers < 1:
        raise ValueError(f"--ray-workers: must be at least 1, got {args.ray_workers}")
    if args.device == "cuda" and not args.gpus_per_worker:
        raise ValueError("--device: Ray workers train on cuda where they have a GPU; use --gpus-per-worker 1")
    from eyas.cluster.torch_workers import check_ray_train

    check_ray_train()


def run_ranks(args: argparse.Namespace, work: Callable[[Ranks], Any]) -> Any:
    """What `work` returns in the first rank; picklable, as its result, where there are several or Ray starts them.

    Raises:
        ValueError, ChildProcessError: see `run_in_processes` and `run_torch_workers`.
    """
    if args.ray_workers is not None:
        return _run_on_ray(args, work)
    if args.ranks > 1:
        return run_in_processes(work, args.ranks, args.device, args.threads)
    torch.set_num_threads(args.threads)
    return work(Ranks(device=torch.device(args.device)))


def _run_on_ray(args: argparse.Namespace, work: Callable[[Ranks], Any]) -> Any:
    from eyas.cluster.torch_workers import run_torch_workers
    from eyas.deployments.local_ray import start_ray

    cpus = max(1, args.threads // args.ray_workers)
    bundle = {"CPU": float(cpus)} | ({"GPU": 1.0} if args.gpus_per_worker else {})
    start_ray([bundle] * args.ray_workers, args.ray_address)
    storage: Path = args.work_dir.resolve()
    in_worker = partial(_work_in_worker, work, cpus)
    return run_torch_workers(in_worker, args.ray_workers, args.gpus_per_worker, cpus, storage)


def _work_in_worker(work: Callable[[Ranks], Any], num_threads: int, rank: int, size: int, device: torch.device) -> Any:
    torch.set_num_threads(num_threads)
    return work(Ranks(rank, size, device))
