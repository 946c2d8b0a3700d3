"""Response and chunk shapes."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from eyas.deployments.engine_client import GenerationEvent
from eyas.deployments.responses import ChatResponseBuilder, TextResponseBuilder, model_card, sse_event, usage_block

LAST = GenerationEvent("", (1,), "stop", num_steps=3, num_completion_tokens=7, num_verified_tokens=8)


def test_usage_adds_up():
    """Catches an acceptance length computed from the tokens shown: stops cut them, and the first was not verified."""
    usage = usage_block(10, LAST, seed=5)
    assert usage == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "eyas": {"acceptance_length": round(8 / 3, 4), "steps": 3, "seed": 5},
    }


def test_usage_without_a_verify_step():
    """Catches dividing by zero when the prompt's own pass gave the only token."""
    event = GenerationEvent("a", (1,), "length", num_steps=0, num_completion_tokens=1, num_verified_tokens=0)
    assert usage_block(10, event, seed=5)["eyas"]["acceptance_length"] is None


def test_chat_shapes_satisfy_openais_types():
    """Catches a field missing or of the wrong type for typed clients."""
    builder = ChatResponseBuilder("chatcmpl-1", 1, "m")
    whole = builder.whole("hi", "stop", usage_block(10, LAST, seed=5))
    assert ChatCompletion.model_validate(whole, strict=True).choices[0].message.content == "hi"
    chunks = [*builder.opening_chunks(), builder.text_chunk("hi"), builder.closing_chunk("length")]
    deltas = [ChatCompletionChunk.model_validate(chunk, strict=True).choices[0] for chunk in chunks]
    assert deltas[0].delta.role == "assistant"
    assert [choice.delta.content for choice in deltas] == ["", "hi", None]
    assert [choice.finish_reason for choice in deltas] == [None, None, "length"]


def test_completion_shapes_satisfy_openais_types():
    """Catches a field missing or of the wrong type for typed clients."""
    builder = TextResponseBuilder("cmpl-1", 1, "m")
    whole = builder.whole("hi", "stop", usage_block(10, LAST, seed=5))
    assert Completion.model_validate(whole).choices[0].text == "hi"
    assert builder.opening_chunks() == []
    assert builder.text_chunk("hi")["choices"][0] == {"index": 0, "text": "hi", "logprobs": None, "finish_reason": None}
    assert builder.closing_chunk("stop")["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("builder_type", [ChatResponseBuilder, TextResponseBuilder])
def test_usage_in_streams(builder_type):
    """Catches usage on every chunk, or the key missing where OpenAI sets it to null."""
    usage = usage_block(10, LAST, seed=5)
    builder = builder_type("id", 1, "m", includes_usage=True)
    assert builder.text_chunk("hi")["usage"] is None
    assert builder.closing_chunk("stop")["usage"] is None
    assert builder.usage_chunk(usage)["choices"] == []
    assert builder.usage_chunk(usage)["usage"] == usage
    assert "usage" not in builder_type("id", 1, "m").text_chunk("hi")


def test_server_sent_events_are_one_line():
    """Catches line breaks in the text that would split an event."""
    event = sse_event({"text": "a\n\nb é"})
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: ")) == {"text": "a\n\nb é"}
    assert sse_event("[DONE]") == b"data: [DONE]\n\n"


def test_model_card():
    """Catches a model list that OpenAI's clients cannot read."""
    card = model_card("m", 5, 100)
    assert card == {"id": "m", "object": "model", "created": 5, "owned_by": "eyas", "max_model_len": 100}
