"""The engine as the ingress sees it: an `EngineClient` whose steps run in a thread of their own.

The thread owns the scheduler and the workers' channel; the event loop only queues commands and receives events.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from eyas.deployments.engine_client import (
    EngineDownError,
    EngineHealth,
    EngineStatus,
    GenerationError,
    GenerationEvent,
    GenerationRequest,
    QueueFullError,
)
from eyas.deployments.metrics import Metrics
from eyas.deployments.scheduler import ScheduledRequest, Scheduler
from eyas.deployments.text_stream import TextStream, TokenDecoder
from eyas.workers.messages import StepPlan, StepResult

_IDLE_POLL_S = 0.5
_log = logging.getLogger("ray.serve")


class Workers(Protocol):
    """The workers' end of the step channel; see `WorkerGroup`."""

    def send(self, plan: StepPlan) -> None: ...

    def receive(self) -> StepResult: ...

    def check(self) -> None: ...

    def stop(self) -> None: ...


class EventSink:
    """One request's way back: tokens from the engine thread become events on the caller's loop."""

    def __init__(self, stream: TextStream, loop: asyncio.AbstractEventLoop) -> None:
        self.events: asyncio.Queue[GenerationEvent | Exception] = asyncio.Queue()
        self._stream = stream
        self._loop = loop
        self._num_steps = 0
        self._num_verified = 0
        self._is_past_prefill = False

    def push(self, token_ids: list[int]) -> bool:
        """Engine thread: forward what the tokens add; True when the text ended."""
        if self._is_past_prefill:
            self._num_steps += 1
            self._num_verified += len(token_ids)
        self._is_past_prefill = True
        try:
            delta = self._stream.push(token_ids)
        except Exception:  # text that cannot be decoded ends its own request, not everybody's
            _log.exception("the tokens of a request could not be turned into text")
            self.fail("the tokens of this request could not be turned into text")
            return True
        self._post(
            GenerationEvent(
                text=delta.text,
                token_ids=delta.token_ids,
                finish_reason=delta.finish_reason,
                num_steps=self._num_steps,
                num_completion_tokens=self._stream.num_tokens,
                num_verified_tokens=self._num_verified,
            )
        )
        return delta.finish_reason is not None

    def fail(self, message: str) -> None:
        """Engine thread: the request cannot go on."""
        self._post(GenerationError(message))

    def _post(self, event: GenerationEvent | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            _log.warning("the event loop of a request closed before its answer ended")


@dataclass(frozen=True, slots=True)
class _Submit:
    request: ScheduledRequest


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: int


class Engine:
    """Runs steps for all open requests until stopped or until the workers are lost."""

    def __init__(
        self,
        workers: Workers,
        scheduler: Scheduler,
        decoder: TokenDecoder,
        metrics: Metrics,
        max_queue_size: int,
        on_down: Callable[[str], None] = lambda reason: None,
        speculates: bool = True,
    ) -> None:
        """Args:
        on_down: called once, from the engine thread, when the workers are lost.
        """
        self._workers = workers
        self._scheduler = scheduler
        self._decoder = decoder
        self._metrics = metrics
        self._max_queue_size = max_queue_size
        self._on_down = on_down
        self._speculates = speculates
        self._commands: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._num_open = 0
        self._down_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Queue the request at the first step of the iteration; closing the generator cancels it."""
        if self._down_reason is not None:
            raise EngineDownError(self._down_reason)
        if self._num_open >= self._max_queue_size + self._scheduler.max_batch_size:
            raise QueueFullError(f"{self._num_open} requests are open already; retry later")
        sink = EventSink(TextStream.of_request(self._decoder, request), asyncio.get_running_loop())
        request_id = next(self._ids)
        scheduled = ScheduledRequest(request_id, request.prompt_ids, request.sampling, request.max_tokens, sink)
        self._scheduler.check_size(scheduled)
        self._num_open += 1
        self._commands.put(_Submit(scheduled))
        is_over = False
        try:
            if self._down_reason is not None:  # the thread may have emptied its queue before it could see this request
                raise EngineDownError(self._down_reason)
            while not is_over:
                event = await sink.events.get()
                if isinstance(event, Exception):
                    is_over = True
                    raise event if self._down_reason is None else EngineDownError(self._down_reason)
                is_over = event.finish_reason is not None
                yield event
        finally:
            self._num_open -= 1
            if not is_over:
                self._commands.put(_Cancel(request_id))

    def health(self) -> EngineHealth:
        """Red as soon as the workers are lost, also when they have only stopped answering."""
        status: EngineStatus = "ok" if self._down_reason is None else "down"
        return EngineHealth(status, self._down_reason or "", self._scheduler.num_running, self._scheduler.num_waiting)

    def stop(self) -> None:
        """End the thread and the workers; open requests get an error."""
        self._commands.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        reason, is_lost = "the engine was stopped", False
        try:
            while self._take_commands():
                if self._scheduler.has_work:
                    self._step()
        except Exception as error:  # whatever it was, no step will follow: tell everybody waiting, then the owner
            _log.exception("the engine stopped")
            reason, is_lost = f"the engine stopped: {error}", True
        self._down_reason = reason  # set before the queue is emptied: see `generate`
        self._fail_everybody(reason)
        if is_lost:
            self._on_down(reason)
        self._workers.stop()

    def _take_commands(self) -> bool:
        """Apply queued commands, waiting for one while there is no work; False on stop."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.has_work, timeout=_IDLE_POLL_S)
            except queue.Empty:
                if self._scheduler.has_work:
                    return True
                self._workers.check()
                continue
            if command is None:
                return False
            if isinstance(command, _Submit):
                self._scheduler.submit(command.request)
            else:
                self._scheduler.cancel(command.request_id)

    def _step(self) -> None:
        start = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            raise RuntimeError("requests wait, but none can ever be admitted")
        self._workers.send(plan)
        result = self._workers.receive()
        if result.step != plan.step:
            raise RuntimeError(f"result of step {result.step} arrived for step {plan.step}")
        self._scheduler.apply(result)
        self._record(plan, result, (time.perf_counter() - start) * 1e3)

    def _record(self, plan: StepPlan, result: StepResult, total_ms: float) -> None:
        metrics, scheduler = self._metrics, self._scheduler
        metrics.set_load(num_running=scheduler.num_running, num_waiting=scheduler.num_waiting)
        total = scheduler.allocator.num_pages
        metrics.set_pages("target", num_free=total - result.target_pages, num_total=total)
        if self._speculates:
            metrics.set_pages("drafter", num_free=total - result.drafter_pages, num_total=total)
        if plan.decode:
            metrics.record_step(
                draft_ms=result.draft_ms,
                verify_ms=result.verify_ms,
                other_ms=max(total_ms - result.draft_ms - result.verify_ms, 0.0),
                batch_size=len(plan.decode),
                acceptance_lengths=[len(run.tokens) for run in result.runs[: len(plan.decode)]],
            )

    def _fail_everybody(self, reason: str) -> None:
        self._scheduler.fail_all(reason)
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Submit):
                command.request.sink.fail(reason)
