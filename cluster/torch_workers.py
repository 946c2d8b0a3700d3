"""One function in several processes of a Ray cluster that form a `torch.distributed` group: Ray Train starts them.

Ray Train places one worker per bundle, sets up NCCL between GPUs or Gloo between CPUs, sees a worker or node that dies,
and starts the whole group again. What the function had done by then is its own to find again, from files that every
node sees: it is called anew and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MAX_RESTARTS = 3


def run_torch_workers(
    work: Callable[[int, int, torch.device], Any], num_workers: int, gpus_per_worker: int, cpus_per_worker: int,
    storage: Path
) -> Any:  # fmt: skip
    """What `work(rank, number of ranks, device)` returns in rank 0; needs a running connection to Ray.

    Args:
        gpus_per_worker: 0 or 1.
        storage: folder for Ray Train's own notes, seen by all nodes.

    Raises:
        ValueError: if Ray Train is not installed, or `work` refuses its arguments so.
        ChildProcessError: if the group failed more than `MAX_RESTARTS` times.
    """
    check_ray_train()
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    if gpus_per_worker not in (0, 1):
        raise ValueError(f"gpus_per_worker: a rank drives one GPU or none, got {gpus_per_worker}")

    def run_worker() -> Any:
        import ray.train
        from ray.train.torch import get_device

        context = ray.train.get_context()
        return work(context.get_world_rank(), context.get_world_size(), get_device())

    resources = {"CPU": float(cpus_per_worker)} | ({"GPU": 1.0} if gpus_per_worker else {})
    trainer = TorchTrainer(
        run_worker,
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu=bool(gpus_per_worker), resources_per_worker=resources
        ),
        run_config=RunConfig(
            name="ray-train", storage_path=str(storage), failure_config=FailureConfig(max_failures=MAX_RESTARTS)
        ),
    )
    try:
        result: Any = trainer.fit()
        return result.return_value
    except TrainingFailedError as error:
        failures: dict[int, Exception] = getattr(error, "worker_failures", {})
        refusal = next((failure for failure in failures.values() if isinstance(failure, ValueError)), None)
        if refusal is not None:
            raise ValueError(str(refusal)) from None
        raise ChildProcessError(f"Ray Train gave up after {MAX_RESTARTS} restarts: {error}") from error


def check_ray_train() -> None:
    """Raises:
    ValueError: saying what to install, if Ray Train cannot be imported.
    """
    try:
        import ray.train.torch  # noqa: F401
    except ImportError as error:
        raise ValueError(f"Ray Train cannot be imported ({error}): pip install 'eyas[train]'") from None
