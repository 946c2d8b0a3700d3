"""Prometheus metrics of one router replica, in a registry of its own (Ray keeps its metrics in the global one).

Two writers: the ingress (requests and latencies) and the engine thread (steps, pages, queue); both may write at any
time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eyas.deployments.engine_client import GenerationError, GenerationEvent, QueueFullError

# `stop` and `length` are finished answers; `refused` never ran (bad request, full queue); `failed` is our own fault.
Outcome = Literal["stop", "length", "cancelled", "refused", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "cancelled", "refused", "failed")
Worker = Literal["target", "drafter"]
WORKERS: tuple[Worker, ...] = ("target", "drafter")

REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
STEP_BUCKETS_MS = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
ACCEPTANCE_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.clock_s = clock_s
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("eyas_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._running = Gauge("eyas_requests_running", "Requests being prefilled or decoded", registry=registry)
        self._waiting = Gauge("eyas_requests_waiting", "Requests queued for pages", registry=registry)
        self._pages_free = Gauge("eyas_pages_free", "KV pages not in use", ["worker"], registry=registry)
        self._pages_total = Gauge("eyas_pages_total", "KV pages of the pool", ["worker"], registry=registry)
        self._tokens = Counter("eyas_tokens_emitted", "Tokens sent to clients", registry=registry)
        self._steps = Counter("eyas_verify_steps", "Target passes that verified at least one tree", registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._acceptance = histogram(
            "eyas_acceptance_length", "Tokens emitted by one verify step of one request", ACCEPTANCE_BUCKETS
        )
        self._ttft = histogram("eyas_ttft_s", "Seconds from a request to its first token", REQUEST_BUCKETS_S)
        self._tpot = histogram("eyas_tpot_s", "Seconds per token after the first, mean of a request", TOKEN_BUCKETS_S)
        self._e2e = histogram("eyas_e2e_s", "Seconds from a request to its last token, if finished", REQUEST_BUCKETS_S)
        self._draft = histogram("eyas_draft_ms", "Milliseconds of a step in the drafter", STEP_BUCKETS_MS)
        self._verify = histogram("eyas_verify_ms", "Milliseconds of a step in the target", STEP_BUCKETS_MS)
        self._other = histogram("eyas_other_ms", "Milliseconds of a step in neither", STEP_BUCKETS_MS)
        self._batch = histogram("eyas_batch_size", "Requests in one step", BATCH_BUCKETS)

        # A series that appears only with its first event breaks rates and alerts on it.
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for worker in WORKERS:
            self.set_pages(worker, num_free=0, num_total=0)

    def count_request(self, outcome: Outcome) -> None:
        self._requests.labels(outcome).inc()

    def set_load(self, *, num_running: int, num_waiting: int) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def set_pages(self, worker: Worker, *, num_free: int, num_total: int) -> None:
        self._pages_free.labels(worker).set(num_free)
        self._pages_total.labels(worker).set(num_total)

    def record_step(
        self,
        *,
        draft_ms: float,
        verify_ms: float,
        other_ms: float,
        batch_size: int,
        acceptance_lengths: Iterable[int] = (),
    ) -> None:
        """One engine step; `acceptance_lengths` has an entry for each request whose tree it verified."""
        lengths = list(acceptance_lengths)
        self._draft.observe(draft_ms)
        self._verify.observe(verify_ms)
        self._other.observe(other_ms)
        self._batch.observe(batch_size)
        for length in lengths:
            self._acceptance.observe(length)
        if lengths:
            self._steps.inc()

    async def observe_request(
        self, events: AsyncGenerator[GenerationEvent, None], arrived_s: float
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Pass `events` on, counting the request once under its outcome and timing its tokens from `arrived_s` on.

        Closes `events`. Events that end without a finish reason are a `GenerationError`.
        """
        outcome: Outcome = "cancelled"
        first_s = last_s = arrived_s
        num_first = num_tokens = 0
        try:
            async with aclosing(events):
                async for event in events:
                    last_s = self.clock_s()
                    if event.token_ids and not num_tokens:
                        first_s, num_first = last_s, event.num_completion_tokens
                        self._ttft.observe(first_s - arrived_s)
                    self._tokens.inc(len(event.token_ids))
                    num_tokens = event.num_completion_tokens
                    outcome = event.finish_reason or "cancelled"
                    yield event
            if outcome == "cancelled":
                raise GenerationError("The engine ended this request without saying why.")
        except QueueFullError:
            outcome = "refused"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.count_request(outcome)
            if outcome in ("stop", "length"):
                self._e2e.observe(last_s - arrived_s)
                if num_tokens > num_first:
                    self._tpot.observe((last_s - first_s) / (num_tokens - num_first))

    def exposition(self) -> tuple[bytes, str]:
        """The text Prometheus scrapes, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
