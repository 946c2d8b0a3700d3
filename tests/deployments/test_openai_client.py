"""The official OpenAI client against the API, no sockets in between."""

from __future__ import annotations

import httpx2
import openai
import pytest

from eyas.deployments.engine_client import GenerationError, QueueFullError
from eyas.deployments.ingress import build_api

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "Hello, wörld!"


@pytest.fixture
def sdk(context):
    transport = httpx2.ASGITransport(app=build_api(context))
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://eyas/v1",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    )


async def test_chat(sdk):
    """Catches a shape the SDK cannot read, and an extension it drops."""
    answer = await sdk.chat.completions.create(model="eyas/fake", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.model_extra["eyas"]["steps"] == 5
    assert answer._request_id


async def test_an_answer_continues_the_conversation(sdk, engine):
    """Catches refusing the SDK's own message object in the next request."""
    answer = await sdk.chat.completions.create(model="eyas/fake", messages=MESSAGES)
    messages = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    await sdk.chat.completions.create(model="eyas/fake", messages=messages)
    assert bytes(engine.requests[1].prompt_ids).decode() == f"user:hi\nassistant:{ANSWER}\nuser:hi\n"
    dumped = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    await sdk.chat.completions.create(model="eyas/fake", messages=dumped)
    assert engine.requests[2].prompt_ids == engine.requests[1].prompt_ids


async def test_streamed_chat(sdk):
    """Catches framing or chunks the SDK cannot read."""
    stream = await sdk.chat.completions.create(
        model="eyas/fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[-1].usage.completion_tokens == 15


async def test_completion(sdk):
    """Catches a shape the SDK cannot read, and extensions that cannot be sent through it."""
    answer = await sdk.completions.create(
        model="eyas/fake", prompt="hi", max_tokens=100, stop=["ö"], extra_body={"stop_token_ids": [1]}
    )
    assert answer.choices[0].text == "Hello, w"
    stream = await sdk.completions.create(model="eyas/fake", prompt="hi", max_tokens=100, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


async def test_models(sdk):
    """Catches a model list the SDK cannot read, and ids with slashes that it cannot fetch."""
    assert [model.id async for model in sdk.models.list()] == ["eyas/fake"]
    assert (await sdk.models.retrieve("eyas/fake")).owned_by == "eyas"


async def test_errors_become_the_sdks_exceptions(sdk, engine):
    """Catches an error body or status the SDK does not understand."""
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model="eyas/fake", messages=MESSAGES, extra_body={"temperature": "hot"})
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="gpt-5", messages=MESSAGES)
    engine.failure = QueueFullError("The queue is full.")
    with pytest.raises(openai.RateLimitError):
        await sdk.chat.completions.create(model="eyas/fake", messages=MESSAGES, stream=True)


async def test_error_event_in_a_stream_raises(sdk, engine):
    """Catches an error event the SDK would take for the end of the answer."""
    engine.failure, engine.fail_after = GenerationError("Logits are not finite."), 2
    stream = await sdk.chat.completions.create(model="eyas/fake", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="Logits are not finite"):
        async for _ in stream:
            pass
