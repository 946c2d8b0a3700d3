"""Step: target features from one process to another through the exchange ring, and what that costs.

A round trip is: publish the rows, name their slot over a pipe, the other side copies them out, sums them and answers.
What the pipe and the sum take nearly alone is timed as a round trip of a single row. The sums must agree.

Letters: R rows, F features of a row.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch
from outcome import Context, Outcome
from timing import device_ms
from torch import Tensor

from eyas.workers.exchange import HiddenStateExchange, attach_exchange, create_exchange
from eyas.workers.ring import RingHandle, RingShape

NUM_SLOTS = 4
ROUND_TRIPS = 60
WARM_TRIPS = 10
ANSWER_TIMEOUT_S = 20.0


def run(context: Context) -> Outcome:
    row_size, counts = (192, (1, 8)) if context.dry_run else (3 * 4096, (8, 128, 1024))
    shape = RingShape.of(NUM_SLOTS, max(counts), row_size, context.dtype)
    outcome = Outcome(settings={"num_slots": NUM_SLOTS, "row_size": row_size, "dtype": str(context.dtype)})
    with Peer(shape, context.device) as peer:  # one for all sizes: starting a process with a device takes seconds
        bare_ms = peer.round_trip_ms(torch.ones((1, row_size), dtype=context.dtype, device=context.device), outcome)
        for count in counts:
            features = torch.randn((count, row_size), dtype=context.dtype, device=context.device)
            outcome.rows.append(
                {
                    "rows": count,
                    "mebibytes": features.nbytes / 2**20,
                    "round_trip_ms": peer.round_trip_ms(features, outcome),
                    "bare_round_trip_ms": bare_ms,
                    "one_copy_ms": _copy_ms(features),
                }
            )
    if context.dry_run:
        outcome.omitted.append(
            "CUDA IPC: the ring lies in shared memory here; tests/workers run the CUDA one over a double of its runtime"
        )
    return outcome


def _copy_ms(features: Tensor) -> float:
    copied = torch.empty_like(features)
    return device_ms(lambda _: copied.copy_(features), features.device)


class Peer:
    """A process that takes what this one publishes."""

    def __init__(self, shape: RingShape, device: torch.device) -> None:
        self._device = device
        self._exchange: HiddenStateExchange = create_exchange(shape, device)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_take_all, args=(theirs, self._exchange.handle, str(device)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer()
        self._exchange.unlink()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(ANSWER_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()

    def round_trip_ms(self, features: Tensor, outcome: Outcome) -> float:
        """Median over many trips; notes a failure where the other side summed up something else."""
        times = []
        for trip in range(WARM_TRIPS + ROUND_TRIPS):
            sent = features + trip  # new values, or a slot of an earlier lap would pass for this one
            expected = _total(sent)
            start = time.perf_counter()
            slot, sequence = self._exchange.publish(sent, ANSWER_TIMEOUT_S)
            self._pipe.send((slot, sequence, sent.shape[0]))
            total = self._answer()
            if trip >= WARM_TRIPS:
                times.append((time.perf_counter() - start) * 1e3)
            if total != expected:
                outcome.failures.append(f"{features.shape[0]} rows, trip {trip}: sum {total}, published {expected}")
                break
        return statistics.median(times) if times else float("nan")

    def _answer(self) -> float:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"the other process did not answer within {ANSWER_TIMEOUT_S} s")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return float(answer)


def _take_all(pipe: Connection, handle: RingHandle, device_name: str) -> None:
    """Body of the other process."""
    device = torch.device(device_name)
    try:
        exchange = attach_exchange(handle, device)
        pipe.send(0.0)
        while (message := pipe.recv()) is not None:
            pipe.send(_total(exchange.take(*message)))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _total(features: Tensor) -> float:
    """The same in both processes to the last bit: one kernel over one shape."""
    return float(features.sum(dtype=torch.float32))
