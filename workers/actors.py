"""What becomes a Ray actor around each runner: load, measure, allocate, run. All decisions are in the plain classes.

Weights come first on all workers, because only then the memory left for KV pages can be measured; the runners, which
own the pools, are made when the router has told every worker the number agreed on.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from eyas.workers.channel import Outbox, worker_inbox
from eyas.workers.cuda_ipc import check_allocator
from eyas.workers.exchange import HiddenStateExchange, attach_exchange, create_exchange
from eyas.workers.graphs import Progress
from eyas.workers.loading import (
    EngineSpec,
    load_draft_head,
    load_target_model,
    new_draft_runner,
    new_target_runner,
    probe,
    record_steps,
)
from eyas.workers.loops import DraftLoop, TargetLoop
from eyas.workers.memory import (
    MemoryReport,
    head_page_bytes,
    limit_process,
    measure,
    release_cached,
    target_page_bytes,
)
from eyas.workers.probe import ProbeReport
from eyas.workers.rank_group import Rendezvous, join_group
from eyas.workers.ring import RingHandle, RingShape

_log = logging.getLogger("eyas.workers")

_LOGGED_RECORDINGS = 10
_EXCHANGE_SLOTS = 4


class WireAddresses(msgspec.Struct, frozen=True):
    """Inbox addresses of one engine's processes; `drafter` is None without speculation."""

    router: str
    targets: list[str]
    drafter: str | None


class _Worker:
    """What both kinds of worker share: a ZeroMQ context and an inbox, a file in the engine's `socket_folder`."""

    def __init__(self, spec: EngineSpec, socket_folder: str, name: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.spec = spec
        self.context = zmq.Context[Any](1)
        self.inbox = worker_inbox(self.context, f"ipc://{Path(socket_folder, name)}")

    def address(self) -> str:
        """Where this worker receives messages."""
        return self.inbox.address

    def check_environment(self) -> None:
        """Refuse what this process was started with, if device memory could not be shared under it."""
        if torch.device(self.spec.device).type == "cuda":
            check_allocator(os.environ)


class TargetWorker(_Worker):
    """One tensor-parallel rank of the target."""

    def __init__(self, spec: EngineSpec, socket_folder: str, rank: int) -> None:
        super().__init__(spec, socket_folder, f"target-{rank}", spec.num_threads)
        self._rank = rank
        self._rendezvous = Rendezvous(spec.tensor_parallel_size) if rank == 0 else None

    def rendezvous_address(self) -> str:
        """Rank 0 only: where the other ranks join."""
        if self._rendezvous is None:
            raise RuntimeError("only rank 0 keeps the rendezvous")
        return self._rendezvous.address

    def load(self, rendezvous_address: str, max_rows: int) -> RingHandle | None:
        """Join the group and load the weights; rank 0 also allocates the exchange ring, if there is a head to feed.

        Args:
            max_rows: most rows one step can commit.
        """
        self.check_environment()
        spec, device = self.spec, torch.device(self.spec.device)
        size = spec.tensor_parallel_size
        if self._rendezvous is not None:
            parallel = self._rendezvous.join(size, device)
        else:
            parallel = join_group(rendezvous_address, self._rank, size, device)
        self._model = load_target_model(spec, parallel)
        self._exchange: HiddenStateExchange | None = None
        if self._rank == 0 and spec.head_folder is not None:
            row_size = len(spec.capture()) * self._model.config.hidden_size
            shape = RingShape.of(_EXCHANGE_SLOTS, max_rows, row_size, self._model.dtype)
            self._exchange = create_exchange(shape, self._model.device)
        release_cached(self._model.device)
        return self._exchange.handle if self._exchange is not None else None

    def measure(self) -> MemoryReport | None:
        """What is free once all workers have loaded."""
        return measure(self._model.device, target_page_bytes(self._model, self.spec.page_size))

    def allocate(self, num_pages: int) -> None:
        """Make the runner, its pool included."""
        self.spec = self.spec.with_pages(num_pages)
        page_bytes = target_page_bytes(self._model, self.spec.page_size)
        limit_process(self._model.device, num_pages, page_bytes, self.spec.gpu_memory_fraction)
        self._runner = new_target_runner(self.spec, self._model)

    def probe(self, prompts: list[list[int]]) -> ProbeReport | None:
        """Measure what the head reads, before the loop runs; rank 0 answers, the others only help."""
        report = probe(self.spec, self._runner, prompts, self._rank == 0)
        release_cached(self._model.device)  # rank 0's copy of the head, on the GPU that it shares with the drafter
        return report

    def set_capture(self, capture: tuple[int, ...]) -> None:
        """Publish these target states; as many as before, so the exchange ring stays."""
        self._runner.capture = tuple(capture)

    def record(self) -> None:
        """Record the decode steps, where they are replayed; all ranks at once, once what they publish is settled."""
        record_steps(self.spec, self._runner, _log_progress("decode steps"))

    def unlink_exchange(self) -> None:
        """Called once the drafter has attached."""
        if self._exchange is not None:
            self._exchange.unlink()

    def run(self, wire: WireAddresses) -> None:
        """The step loop; returns on shutdown."""
        is_first = self._rank == 0
        TargetLoop(
            self._runner,
            self.inbox,
            has_drafter=wire.drafter is not None,
            to_router=Outbox(self.context, wire.router) if is_first else None,
            to_drafter=Outbox(self.context, wire.drafter) if is_first and wire.drafter is not None else None,
            exchange=self._exchange,
        ).run()


class DraftWorker(_Worker):
    """The drafter."""

    def __init__(self, spec: EngineSpec, socket_folder: str) -> None:
        super().__init__(spec, socket_folder, "drafter", spec.drafter_num_threads)

    def load(self, exchange: RingHandle) -> None:
        """Load the head and attach to rank 0's ring."""
        self.check_environment()
        head = load_draft_head(self.spec)
        if head is None:
            raise RuntimeError("an engine without a head needs no drafter")
        self._head = head
        self._exchange = attach_exchange(exchange, head.device)
        release_cached(head.device)

    def measure(self) -> MemoryReport | None:
        """What is free once all workers have loaded."""
        return measure(self._head.device, head_page_bytes(self._head, self.spec.page_size))

    def allocate(self, num_pages: int) -> None:
        """Make the runner, its pool included."""
        self.spec = self.spec.with_pages(num_pages)
        page_bytes = head_page_bytes(self._head, self.spec.page_size)
        limit_process(self._head.device, num_pages, page_bytes, self.spec.gpu_memory_fraction)
        self._runner = new_draft_runner(self.spec, self._head)

    def record(self) -> None:
        """Record whole drafts, where they are replayed."""
        record_steps(self.spec, self._runner, _log_progress("drafts"))

    def run(self, wire: WireAddresses) -> None:
        """The step loop; returns on shutdown."""
        to_targets = [Outbox(self.context, address) for address in wire.targets]
        DraftLoop(self._runner, self.inbox, to_targets, self._exchange).run()


def _log_progress(what: str) -> Progress:
    def log(done: int, total: int) -> None:
        if done == total or done % _LOGGED_RECORDINGS == 0:
            _log.info("recorded %d of %d %s", done, total, what)

    return log
