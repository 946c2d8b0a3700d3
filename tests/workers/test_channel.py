"""The control channel: every message survives the wire as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from eyas.workers.channel import Outbox, router_inbox, worker_inbox
from eyas.workers.messages import (
    AcceptedRun,
    DecodeItem,
    DraftedTree,
    DraftedTrees,
    NewRequest,
    PrefillChunk,
    Shutdown,
    StepOutcome,
    StepPlan,
    StepResult,
)
from eyas.workers.sampling import SamplingParams

RUN = AcceptedRun(7, 12, 3, [5, 6, 7])
TO_WORKERS = [
    StepPlan(
        step=3,
        new=[NewRequest(7, [1, 2, 3], SamplingParams(0.5, 0.9, (1 << 63) - 1))],
        new_pages={7: [0, 4]},
        finished=[1],
        prefill=[PrefillChunk(7, 3)],
        decode=[DecodeItem(2, 16)],
        draft_depth=5,
        width=4,
    ),
    DraftedTrees(3, [DraftedTree(2, [9, 8], [-1, 0])], 1.5, 2),
    StepOutcome(3, [RUN], 1, 8),
    Shutdown(),
]
RESULT = StepResult(3, [RUN], {2: "not finite"}, 1.0, 2.0, 3, 4)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context[Any](1)
    yield context
    context.term()


@pytest.mark.parametrize("message", TO_WORKERS, ids=lambda message: type(message).__name__)
def test_worker_messages_round_trip(message: msgspec.Struct, context: zmq.Context[Any], tmp_path: Path) -> None:
    """A field or a tag lost on the wire."""
    inbox = worker_inbox(context, f"ipc://{tmp_path}/inbox")
    outbox = Outbox(context, inbox.address)
    outbox.send(message)
    assert inbox.receive(5.0) == message
    outbox.close()
    inbox.close()


def test_results_reach_the_router_over_tcp(context: zmq.Context[Any]) -> None:
    """Engines that span nodes need an address with a real port in it."""
    inbox = router_inbox(context, "tcp://127.0.0.1:*")
    outbox = Outbox(context, inbox.address)
    outbox.send(RESULT)
    assert inbox.receive(5.0) == RESULT
    outbox.close()
    inbox.close()


def test_receive_times_out(context: zmq.Context[Any], tmp_path: Path) -> None:
    """Waiting for ever on a peer that died."""
    inbox = worker_inbox(context, f"ipc://{tmp_path}/inbox")
    assert inbox.receive(0.01) is None
    inbox.close()
