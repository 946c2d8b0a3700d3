"""The Router: one Serve replica that owns one engine; HTTP ingress, scheduler and worker actors hang on it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import ray
from fastapi import FastAPI
from ray import serve

from eyas.deployments.engine import Engine
from eyas.deployments.ingress import ApiContext, build_api
from eyas.deployments.metrics import Metrics
from eyas.deployments.probe_prompts import probe_prompts
from eyas.deployments.settings import EngineSettings
from eyas.deployments.tokenizer import Tokenizer
from eyas.deployments.worker_group import WorkerGroup

# Serve itself notices a failing health check only after three periods; the replica answers 503 meanwhile, then exits.
_EXIT_DELAY_S = 1.0


@serve.deployment(name="Router")
@serve.ingress()
class Router:
    """Loads the workers when constructed; the replica is ready when they are."""

    def __init__(self, settings: EngineSettings) -> None:
        spec = settings.engine_spec()
        placement_group = ray.util.get_current_placement_group()
        if placement_group is None:
            raise RuntimeError("the Router must run in a placement group; deploy it through eyas.deployments.app:build")
        tokenizer = Tokenizer.from_folder(Path(spec.target_folder))
        workers = WorkerGroup(
            spec,
            placement_group,
            max_rows=settings.max_committed_rows(),
            gpus_per_rank=settings.gpus_per_rank,
            drafter_gpu_fraction=settings.drafter_gpu_fraction,
            probe_prompts=probe_prompts(tokenizer) if settings.probe else None,
            min_pages=settings.min_pages(),
        )
        metrics = Metrics()
        scheduler = settings.new_scheduler(spec, workers.num_pages)
        for worker in ("target", "drafter") if spec.head_folder is not None else ("target",):
            metrics.set_pages(worker, num_free=workers.num_pages, num_total=workers.num_pages)
        self._engine = Engine(
            workers,
            scheduler,
            tokenizer,
            metrics,
            settings.max_queue_size,
            on_down=_exit_soon,
            speculates=spec.head_folder is not None,
        )
        self._context = ApiContext(
            model=settings.model_id,
            tokenizer=tokenizer,
            engine=self._engine,
            metrics=metrics,
            context_length=scheduler.max_request_tokens(),
            vocab_size=spec.target_config().vocab_size,
            echoes_request_id=False,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._context)

    def check_health(self) -> None:
        """Serve's probe: raises when the engine is down."""
        health = self._engine.health()
        if not health.is_serving:
            raise RuntimeError(health.reason)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # construction failed before there was an engine
            self._engine.stop()


def _exit_soon(reason: str) -> None:
    """End the replica: Serve replaces it, and its placement group and workers go with it."""
    threading.Timer(_EXIT_DELAY_S, os._exit, args=(1,)).start()
