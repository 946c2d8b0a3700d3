"""What the HTTP ingress asks of an engine, and what it gets back.

Knows nothing of HTTP, Ray or devices. The engine owns scheduling, detokenisation and stopping: its events carry text
that may be sent as it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from eyas.workers.sampling import SamplingParams

FinishReason = Literal["stop", "length"]
EngineStatus = Literal["ok", "degraded", "starting", "down"]


class EngineError(Exception):
    """A generation that cannot start or go on; the message is written for the client."""


class QueueFullError(EngineError):
    """The engine takes no more requests now; one sent `retry_after_s` later may be taken."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDownError(EngineError):
    """The engine is starting, restarting or dead: no request can be served, this one included."""


class GenerationError(EngineError):
    """This request alone failed, for instance on logits that are not finite; others go on."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated, tokenised request.

    Args:
        request_id: unique among all requests of this process (a client's own id may repeat, so it is never this one).
        max_tokens: at least 1; the prompt and this many tokens fit the context.
        stop_strings: each non-empty; the text ends before the first one completed.
        stop_token_ids: end the text beside the tokenizer's end-of-text tokens, which `ignore_eos` switches off.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """What one engine step added to a request; the three counts are totals since the request began.

    Args:
        text: new text; empty while it could still turn out to be part of a stop string or of an unfinished character.
        token_ids: new tokens, the one that ended the text included, nothing after it.
        finish_reason: set on the last event only.
        num_steps: verify steps this request took part in.
        num_completion_tokens: tokens the client is told about in the usage block.
        num_verified_tokens: sum of the acceptance lengths of its verify steps; the token drawn by the prompt's own pass
            is not among them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_steps: int
    num_completion_tokens: int
    num_verified_tokens: int


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`ok` and `degraded` (serving without speculation) are healthy; the reason says what is wrong otherwise."""

    status: EngineStatus
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0

    @property
    def is_serving(self) -> bool:
        return self.status in ("ok", "degraded")


class EngineClient(Protocol):
    """Runs on the ingress's event loop and never blocks it."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the request's events; the last one carries the finish reason.

        Nothing is queued before the first `__anext__`, which raises `QueueFullError` or `EngineDownError` if the
        request is not taken. Any later `__anext__` may raise an `EngineError`. Closing or cancelling the generator at
        any point cancels the request and frees its pages on both workers.
        """
        ...

    def health(self) -> EngineHealth:
        """The state right now, from what the engine already knows: no call to a worker."""
        ...
