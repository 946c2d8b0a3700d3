"""Answers of the two generation routes in OpenAI's shapes, whole and as stream chunks.

The usage block carries an `eyas` extension: how many tokens a verify step emitted on average, over how many steps, and
the seed that reproduces the text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from eyas.deployments.engine_client import FinishReason, GenerationEvent

JsonObject = dict[str, Any]


def usage_block(num_prompt_tokens: int, last_event: GenerationEvent, seed: int) -> JsonObject:
    """Counts of a finished request; the acceptance length is null if its only token came from the prompt's own pass."""
    num_steps = last_event.num_steps
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": last_event.num_completion_tokens,
        "total_tokens": num_prompt_tokens + last_event.num_completion_tokens,
        "eyas": {
            "acceptance_length": round(last_event.num_verified_tokens / num_steps, 4) if num_steps else None,
            "steps": num_steps,
            "seed": seed,
        },
    }


@dataclass(frozen=True, slots=True)
class ResponseBuilder(ABC):
    """One request's answer; `includes_usage` is whether its stream was asked to end with a usage chunk."""

    completion_id: str
    created: int
    model: str
    includes_usage: bool = False

    @abstractmethod
    def whole(self, text: str, finish_reason: FinishReason, usage: JsonObject) -> JsonObject:
        """The answer of a request that does not stream."""

    @abstractmethod
    def opening_chunks(self) -> list[JsonObject]:
        """What a stream sends before any text."""

    @abstractmethod
    def text_chunk(self, text: str) -> JsonObject: ...

    @abstractmethod
    def closing_chunk(self, finish_reason: FinishReason) -> JsonObject: ...

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """The last chunk of a stream that includes usage: no choices, the counts."""
        return {**self._chunk([]), "usage": usage}

    @property
    @abstractmethod
    def _chunk_object(self) -> str: ...

    def _head(self, object_type: str) -> JsonObject:
        return {"id": self.completion_id, "object": object_type, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        # OpenAI sets usage to null on every other chunk of a stream that was asked for it, and leaves it out otherwise.
        return {
            **self._head(self._chunk_object),
            "choices": choices,
            **({"usage": None} if self.includes_usage else {}),
        }


class ChatResponseBuilder(ResponseBuilder):
    """`chat.completion` and `chat.completion.chunk`."""

    def whole(self, text: str, finish_reason: FinishReason, usage: JsonObject) -> JsonObject:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage}

    def opening_chunks(self) -> list[JsonObject]:
        return [self._delta_chunk({"role": "assistant", "content": ""}, None)]

    def text_chunk(self, text: str) -> JsonObject:
        return self._delta_chunk({"content": text}, None)

    def closing_chunk(self, finish_reason: FinishReason) -> JsonObject:
        return self._delta_chunk({}, finish_reason)

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk"

    def _delta_chunk(self, delta: JsonObject, finish_reason: FinishReason | None) -> JsonObject:
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])


class TextResponseBuilder(ResponseBuilder):
    """`text_completion`, which is also the type of its chunks."""

    def whole(self, text: str, finish_reason: FinishReason, usage: JsonObject) -> JsonObject:
        return {**self._head("text_completion"), "choices": [self._choice(text, finish_reason)], "usage": usage}

    def opening_chunks(self) -> list[JsonObject]:
        return []

    def text_chunk(self, text: str) -> JsonObject:
        return self._chunk([self._choice(text, None)])

    def closing_chunk(self, finish_reason: FinishReason) -> JsonObject:
        return self._chunk([self._choice("", finish_reason)])

    @property
    def _chunk_object(self) -> str:
        return "text_completion"

    def _choice(self, text: str, finish_reason: FinishReason | None) -> JsonObject:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def sse_event(data: JsonObject | str) -> bytes:
    """One server-sent event; a string is sent as it is (`[DONE]`)."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def model_card(model: str, created: int, context_length: int) -> JsonObject:
    """One entry of `GET /v1/models`; `max_model_len` is the name other open servers give the context length."""
    return {"id": model, "object": "model", "created": created, "owned_by": "eyas", "max_model_len": context_length}
