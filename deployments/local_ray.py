"""A Ray instance for one machine, where none is running."""

from __future__ import annotations

import logging
import os

import ray


def start_ray(bundles: list[dict[str, float]], address: str | None = None) -> None:
    """Connect to `address`, or start Ray here with room for `bundles`.

    CPUs are Ray's bookkeeping, not a limit: target and drafter take turns, so an engine may count more CPUs than the
    machine has cores.
    """
    if ray.is_initialized():
        return
    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        return
    needed = sum(bundle.get("CPU", 0.0) for bundle in bundles) + 1
    ray.init(
        address="local",  # not the cluster that RAY_ADDRESS or an earlier `ray start` names
        num_cpus=max(os.cpu_count() or 1, int(needed)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        configure_logging=True,
    )
