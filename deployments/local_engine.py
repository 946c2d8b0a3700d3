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
from eyas.models.decoder import Decoder
from eyas.models.head import DraftHead
from eyas.workers.loading import (
    EngineSpec,
    load_draft_head,
    load_target_model,
    new_draft_runner,
    new_target_runner,
    record_steps,
)
from eyas.workers.local import LocalWorkers
from eyas.workers.memory import agree_num_pages, head_page_bytes, measure, release_cached, target_page_bytes
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
    with _open_workers(spec, settings, prompts) as (workers, num_pages):
        engine = OfflineEngine(
            workers,
            PageAllocator(num_pages, settings.page_size),
            settings.tree_shape(),
            settings.max_batch_size,
            settings.max_prefill_tokens,
            spec.target_config().max_positions,
        )
        yield engine, tokenizer


@contextmanager
def _open_workers(
    spec: EngineSpec, settings: EngineSettings, prompts: list[list[int]] | None
) -> Iterator[tuple[Workers, int]]:
    """The workers, and the pages of their pools."""
    if spec.tensor_parallel_size == 1:
        torch.set_num_threads(spec.num_threads)
        model, head = load_target_model(spec), load_draft_head(spec)
        num_pages = _agree_num_pages(spec, model, head, settings.min_pages())
        spec = spec.with_pages(num_pages)
        target, drafter = new_target_runner(spec, model), None if head is None else new_draft_runner(spec, head)
        if drafter is not None and prompts is not None:
            report = probe_head(target, drafter.head, spec.plausible_captures(), prompts)
            if report is not None:
                log_probe(report)
                target.capture = report.capture
        record_steps(spec, target)
        if drafter is not None:
            record_steps(spec, drafter)
        yield LocalWorkers(target, drafter), num_pages
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
            spec,
            group,
            settings.max_committed_rows(),
            settings.gpus_per_rank,
            settings.drafter_gpu_fraction,
            prompts,
            settings.min_pages(),
        )
        yield workers, workers.num_pages
    finally:
        if workers is not None:
            workers.stop()
        remove_placement_group(group)
        ray.shutdown()


def _agree_num_pages(spec: EngineSpec, model: Decoder, head: DraftHead | None, min_pages: int) -> int:
    """As `WorkerGroup` does, for a target and a head in this process."""
    release_cached(model.device)
    page_bytes = target_page_bytes(model, spec.page_size)
    if head is not None:
        page_bytes += head_page_bytes(head, spec.page_size)
    report = measure(model.device, page_bytes)
    return agree_num_pages(spec.num_pages, [report], spec.gpu_memory_fraction, min_pages)
