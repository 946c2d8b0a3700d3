"""An offline engine from settings: in this process, or over Ray actors when the target is tensor-parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from eyas.deployments.offline import OfflineEngine, Workers
from eyas.deployments.pages import PageAllocator
from eyas.deployments.probe_prompts import log_probe, probe_prompts
from eyas.deployments.settings import EngineSettings
from eyas.deployments.tokenizer import Tokenizer
from eyas.workers.loading import EngineSpec, load_drafter, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.probe import probe_head


@contextmanager
def open_engine(settings: EngineSettings) -> Iterator[tuple[OfflineEngine, Tokenizer]]:
    """Load the model and head of `settings`; releases actors on exit.

    Raises:
        ValueError: naming the setting that cannot work.
    """
    spec = settings.engine_spec()
    spec.check_device()
    tokenizer = Tokenizer.from_folder(Path(spec.target_folder))
    prompts = probe_prompts(tokenizer) if settings.probe else None
    with _open_workers(spec, settings, prompts) as workers:
        engine = OfflineEngine(
            workers,
            PageAllocator(settings.num_pages, settings.page_size),
            settings.tree_shape(),
            settings.max_batch_size,
            settings.max_prefill_tokens,
            spec.target_config().max_positions,
        )
        yield engine, tokenizer


@contextmanager
def _open_workers(spec: EngineSpec, settings: EngineSettings, prompts: list[list[int]] | None) -> Iterator[Workers]:
    if spec.tensor_parallel_size == 1:
        torch.set_num_threads(spec.num_threads)
        target, drafter = load_target(spec), load_drafter(spec)
        if drafter is not None and prompts is not None:
            report = probe_head(target, drafter.head, spec.plausible_captures(), prompts)
            if report is not None:
                log_probe(report)
                target.capture = report.capture
        yield LocalWorkers(target, drafter)
        return
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from eyas.deployments.local_ray import start_ray
    from eyas.deployments.worker_group import WorkerGroup, WorkersLostError

    bundles = settings.placement_bundles()
    start_ray(bundles)
    group = placement_group(bundles, strategy="STRICT_PACK")
    workers = None
    try:
        if not group.wait(60):
            raise WorkersLostError(f"this machine has no room for the bundles {bundles}")
        workers = WorkerGroup(
            spec, group, settings.max_committed_rows(), settings.gpus_per_rank, settings.drafter_gpu_fraction, prompts
        )
        yield workers
    finally:
        if workers is not None:
            workers.stop()
        remove_placement_group(group)
        ray.shutdown()
