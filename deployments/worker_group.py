"""The actors of one engine: placed, loaded, wired, watched, stopped; and the router's end of their channel."""

from __future__ import annotations

import contextlib
import tempfile
import time
from typing import Any

import ray
import zmq
from ray.util.placement_group import PlacementGroup

from eyas.cluster.placement import DRAFTER_BUNDLE_INDEX, drafter_resources, in_bundle, rank_resources
from eyas.deployments.probe_prompts import log_probe
from eyas.workers.actors import DraftWorker, TargetWorker, WireAddresses
from eyas.workers.channel import Outbox, router_inbox
from eyas.workers.loading import EngineSpec
from eyas.workers.memory import agree_num_pages
from eyas.workers.messages import Shutdown, StepPlan, StepResult
from eyas.workers.threads import thread_environment

_POLL_S = 0.2


class WorkersLostError(ConnectionError):
    """A worker ended or stayed silent; the whole group must be replaced."""


class WorkerGroup:
    """Target ranks and drafter of one engine.

    Keeps the actor handles: Ray kills an actor when its last handle goes.
    """

    def __init__(
        self,
        spec: EngineSpec,
        placement_group: PlacementGroup,
        max_rows: int,
        gpus_per_rank: float,
        drafter_gpu_fraction: float,
        probe_prompts: list[list[int]] | None = None,
        min_pages: int = 1,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        """Start and wire all workers; returns when they wait for plans.

        Args:
            max_rows: most rows a step can commit; sizes the exchange ring.
            probe_prompts: texts to measure the head on; None trusts its files.
            min_pages: pages without which no request could run, for an engine whose pages are measured.

        Attributes:
            num_pages: pages of every worker's pool.

        Raises:
            ValueError: if the GPUs' memory does not hold the pages; see `agree_num_pages`.
            WorkersLostError: if one of them fails or they are not ready in `start_timeout_s`.
        """
        self._spec = spec
        self._step_timeout_s = step_timeout_s
        self._sockets = tempfile.TemporaryDirectory(prefix="eyas-", ignore_cleanup_errors=True)
        self._outboxes: list[Outbox] = []
        self._runs: list[Any] = []
        cpus = float(spec.num_threads)
        self._ranks: list[Any] = [
            ray.remote(max_restarts=0)(TargetWorker)
            .options(
                **rank_resources(rank, gpus_per_rank, drafter_gpu_fraction, cpus),
                scheduling_strategy=in_bundle(placement_group, rank),
                runtime_env={"env_vars": thread_environment(spec.num_threads)},
            )
            .remote(spec, self._sockets.name, rank)
            for rank in range(spec.tensor_parallel_size)
        ]
        self._drafter: Any = None
        if spec.head_folder is not None:
            self._drafter = (
                ray.remote(max_restarts=0)(DraftWorker)
                .options(
                    **drafter_resources(gpus_per_rank, drafter_gpu_fraction, cpus),
                    scheduling_strategy=in_bundle(placement_group, DRAFTER_BUNDLE_INDEX),
                    runtime_env={"env_vars": thread_environment(spec.drafter_num_threads)},
                )
                .remote(spec, self._sockets.name)
            )
        self._context = zmq.Context[Any](1)
        self._inbox = router_inbox(self._context, f"ipc://{self._sockets.name}/router")
        try:
            self.num_pages = self._start(max_rows, probe_prompts, min_pages, start_timeout_s)
        except ray.exceptions.GetTimeoutError:
            self.stop()
            raise WorkersLostError(
                f"the workers were not ready within {start_timeout_s} s; `ray status` shows whether their CPUs exist"
            ) from None
        except ray.exceptions.RayError as error:
            self.stop()
            raise WorkersLostError(f"a worker failed while it was loaded: {_cause(error)}") from error
        except ValueError:
            self.stop()
            raise

    def _start(self, max_rows: int, probe_prompts: list[list[int]] | None, min_pages: int, timeout_s: float) -> int:
        """Load all workers, agree on the pages, measure the head, connect; returns the pages."""
        deadline = time.monotonic() + timeout_s

        def get(references: Any) -> Any:
            return ray.get(references, timeout=max(deadline - time.monotonic(), 1.0))

        rendezvous = get(self._ranks[0].rendezvous_address.remote())
        exchange = get([rank.load.remote(rendezvous, max_rows) for rank in self._ranks])[0]
        if self._drafter is not None:
            get(self._drafter.load.remote(exchange))
            get(self._ranks[0].unlink_exchange.remote())
        workers = [*self._ranks, *([self._drafter] if self._drafter is not None else [])]
        reports = get([worker.measure.remote() for worker in workers])
        num_pages = agree_num_pages(self._spec.num_pages, reports, self._spec.gpu_memory_fraction, min_pages)
        get([worker.allocate.remote(num_pages) for worker in workers])
        if self._drafter is not None and probe_prompts is not None:
            report = get([rank.probe.remote(probe_prompts) for rank in self._ranks])[0]
            if report is not None:
                log_probe(report)
                get([rank.set_capture.remote(report.capture) for rank in self._ranks])
        get([worker.record.remote() for worker in workers])
        addresses = get([worker.address.remote() for worker in workers])
        targets = addresses[: len(self._ranks)]
        wire = WireAddresses(self._inbox.address, targets, addresses[-1] if self._drafter is not None else None)
        self._outboxes = [Outbox(self._context, address) for address in addresses]
        self._runs = [worker.run.remote(wire) for worker in workers]
        return num_pages

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to every worker."""
        for outbox in self._outboxes:
            outbox.send(plan)

    def receive(self) -> StepResult:
        """The next step's result.

        Raises:
            WorkersLostError: as soon as a worker has ended, or when no result comes in `step_timeout_s`.
        """
        deadline = time.monotonic() + self._step_timeout_s
        while True:
            result: StepResult | None = self._inbox.receive(_POLL_S)
            if result is not None:
                return result
            self.check()
            if time.monotonic() > deadline:
                raise WorkersLostError(f"no step finished within {self._step_timeout_s} s")

    def step(self, plan: StepPlan) -> StepResult:
        """`send`, then `receive`."""
        self.send(plan)
        return self.receive()

    def check(self) -> None:
        """Raise `WorkersLostError` if any worker's loop has ended."""
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        if ended:
            try:
                ray.get(ended[0])
            except ray.exceptions.RayError as error:
                raise WorkersLostError(f"a worker failed: {_cause(error)}") from error
            raise WorkersLostError("a worker left its loop")

    def stop(self) -> None:
        """End all workers; safe to call twice."""
        for outbox in self._outboxes:
            outbox.send(Shutdown())
            outbox.close()
        self._outboxes = []
        if self._runs:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(self._runs, num_returns=len(self._runs), timeout=2.0)
        self._sockets.cleanup()  # not before: a connection that is still being made needs the file
        for worker in [*self._ranks, self._drafter]:
            if worker is not None:
                ray.kill(worker)
        self._inbox.close()
        self._context.term()


def _cause(error: Exception) -> Exception:
    """What a failed task raised, without the worker's stack: the text reaches clients."""
    cause: Exception | None = getattr(error, "cause", None)
    return cause or error
