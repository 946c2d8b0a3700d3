"""The HTTP surface end to end, with an engine that needs no model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket

import httpx2
import pytest
import uvicorn
from starlette.requests import ClientDisconnect

from eyas.deployments.engine_client import EngineDownError, EngineHealth, GenerationError, QueueFullError
from eyas.deployments.ingress import ApiContext, build_api

pytestmark = pytest.mark.anyio

CHAT = {"model": "eyas/fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "eyas/fake", "prompt": "hi", "max_tokens": 100}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
ANSWER = "Hello, wörld!"


@contextlib.asynccontextmanager
async def served(context):
    """The API behind a real HTTP server, as bytes on a socket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(build_api(context), ws="none", log_level="warning")
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx2.AsyncClient(base_url=base_url) as client:
                yield client
        finally:
            server.should_exit = True
            await task


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_chat(client, engine):
    """Catches a wrong prompt, text, count or finish reason on the plainest request."""
    response = await client.post("/v1/chat/completions", json={**CHAT, "seed": 5})
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "eyas/fake"
    assert body["choices"][0]["message"]["content"] == ANSWER
    assert body["choices"][0]["finish_reason"] == "stop"
    num_prompt_tokens = len("user:hi\n")
    assert body["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 15,
        "total_tokens": num_prompt_tokens + 15,
        "eyas": {"acceptance_length": 2.8, "steps": 5, "seed": 5},
    }
    assert bytes(engine.requests[0].prompt_ids) == b"user:hi\n"


async def test_completion(client, engine):
    """Catches the chat template applied to a bare prompt, and OpenAI's default of 16 tokens lost."""
    body = (await client.post("/v1/completions", json={**TEXT, "max_tokens": 4})).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == ANSWER[:4]
    assert body["choices"][0]["finish_reason"] == "length"
    await client.post("/v1/completions", json={"model": "eyas/fake", "prompt": [104, 105]})
    assert [request.prompt_ids for request in engine.requests] == [[104, 105], [104, 105]]
    assert engine.requests[1].max_tokens == 16


async def test_every_setting_reaches_the_engine(client, engine):
    """Catches a field that is parsed but not passed on."""
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 11,
        "max_tokens": 20,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    await client.post("/v1/completions", json={**TEXT, **settings})
    request = engine.requests[0]
    assert dataclasses.asdict(request) | {"request_id": "", "sampling": None} == {
        "request_id": "",
        "prompt_ids": [104, 105],
        "sampling": None,
        "max_tokens": 20,
        "stop_strings": ("a", "b"),
        "stop_token_ids": frozenset({7}),
        "ignore_eos": True,
    }
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.5, 0.9, 11)


async def test_drawn_seed_is_told(client, engine):
    """Catches a sampled answer that nobody can reproduce."""
    body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["usage"]["eyas"]["seed"] == engine.requests[0].sampling.seed > 0


async def test_default_chat_limit(context, engine):
    """Catches a default that exceeds the context, or that ignores the setting."""
    for default, expected in ((30, 30), (1000, 200 - len("user:hi\n"))):
        api = build_api(dataclasses.replace(context, default_chat_tokens=default))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=api), base_url="http://eyas") as client:
            await client.post("/v1/chat/completions", json=CHAT)
        assert engine.requests[-1].max_tokens == expected


async def test_request_ids_of_the_engine_are_unique(client, engine):
    """Catches two requests that share a client's id getting in each other's way."""
    for _ in range(2):
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "same"})
        assert response.headers["x-request-id"] == "same"
    assert len({request.request_id for request in engine.requests}) == 2


async def test_chat_stream(client, sse_chunks):
    """Catches a stream whose text, framing, role chunk or last chunk differs from the whole answer."""
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = sse_chunks(response.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_completion_stream_with_usage(client, sse_chunks):
    """Catches a usage chunk that is missing, early or different from the one of a whole answer."""
    fields = {**TEXT, "seed": 5}
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    chunks = sse_chunks((await client.post("/v1/completions", json=streamed)).text)
    whole = (await client.post("/v1/completions", json=fields)).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


BAD_REQUESTS = [
    ("empty messages", {**CHAT, "messages": []}, 400, "messages"),
    ("message without role", {**CHAT, "messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    ("message without content", {**CHAT, "messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ("template refuses", {**CHAT, "messages": [{"role": "assistant", "content": "hi"}]}, 400, "messages"),
    ("negative max_tokens", {**CHAT, "max_tokens": -5}, 400, "max_tokens"),
    ("zero max_tokens", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ("unknown model", {**CHAT, "model": "gpt-5"}, 404, "model"),
    ("no model", {"messages": CHAT["messages"]}, 400, "model"),
    ("prompt longer than the context", {**TEXT, "prompt": "x" * 300}, 400, "prompt"),
    ("prompt as long as the context", {**TEXT, "prompt": "x" * 200}, 400, "prompt"),
    ("chat longer than the context", {**CHAT, "messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages"),
    ("more tokens than the context", {**CHAT, "max_completion_tokens": 193}, 400, "max_completion_tokens"),
    ("temperature hot", {**CHAT, "temperature": "hot"}, 400, "temperature"),
    ("temperature -1", {**CHAT, "temperature": -1}, 400, "temperature"),
    ("temperature true", {**CHAT, "temperature": True}, 400, "temperature"),
    ("top_p 0", {**CHAT, "top_p": 0}, 400, "top_p"),
    ("stop with 5 entries", {**CHAT, "stop": list("abcde")}, 400, "stop"),
    ("seed 1.5", {**CHAT, "seed": 1.5}, 400, "seed"),
    ("seed -1", {**CHAT, "seed": -1}, 400, "seed"),
    ("stream yes", {**CHAT, "stream": "yes"}, 400, "stream"),
    ("n 2", {**CHAT, "n": 2}, 400, "n"),
    ("tools", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ("logprobs", {**CHAT, "logprobs": True}, 400, "logprobs"),
    ("unknown field", {**CHAT, "temprature": 1}, 400, "temprature"),
    ("empty prompt", {**TEXT, "prompt": ""}, 400, "prompt"),
    ("two prompts", {**TEXT, "prompt": ["a", "b"]}, 400, "prompt"),
    ("prompt ids out of vocabulary", {**TEXT, "prompt": [5, 257]}, 400, "prompt"),
    ("stop token out of vocabulary", {**TEXT, "stop_token_ids": [257]}, 400, "stop_token_ids"),
    ("body not an object", [1, 2], 400, "body"),
    ("malformed JSON", b'{"model": "eyas/fake", "messages": [', 400, "body"),
    ("NaN", b'{"model": "eyas/fake", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}', 400, "top_p"),
    ("empty body", b"", 400, "body"),
    ("body too large", {**TEXT, "prompt": "x" * 5000}, 413, "body"),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "param"), [case[1:] for case in BAD_REQUESTS], ids=[case[0] for case in BAD_REQUESTS]
)
async def test_bad_requests(client, engine, context, body, status, param, is_streamed):
    """Catches a bad request that is served, answered with a 5xx or an unnamed field, or that stops the server."""
    if isinstance(body, dict):
        body = {"stream": is_streamed, **body}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = "/v1/completions" if isinstance(body, dict) and "prompt" in body else "/v1/chat/completions"
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")
    assert engine.requests == []
    assert context.metrics.registry.get_sample_value("eyas_requests_total", {"outcome": "refused"}) == 1
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_no_content_type(client):
    """Catches a body that is guessed to be JSON."""
    response = await client.post("/v1/chat/completions", content=json.dumps(CHAT).encode())
    assert (response.status_code, response.json()["error"]["param"]) == (415, "content-type")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({**CHAT, "model": "gpt-5"}, "model_not_found"),
        ({**CHAT, "messages": [{"role": "user", "content": "x" * 300}]}, "context_length_exceeded"),
        ({**CHAT, "max_tokens": 193}, "context_length_exceeded"),
        ({**CHAT, "top_k": 3}, "unknown_parameter"),
        ({**CHAT, "n": 3}, "unsupported_parameter"),
        ({**CHAT, "seed": "a"}, "invalid_value"),
    ],
)
async def test_error_codes(client, body, code):
    """Catches codes that clients branch on being renamed."""
    assert (await client.post("/v1/chat/completions", json=body)).json()["error"]["code"] == code


async def test_the_whole_context_can_be_used(client, engine):
    """Catches a limit one token too tight."""
    prompt = "x" * 190
    assert (await client.post("/v1/completions", json={**TEXT, "prompt": prompt, "max_tokens": 10})).status_code == 200
    assert (await client.post("/v1/completions", json={**TEXT, "prompt": prompt, "max_tokens": 11})).status_code == 400
    await client.post("/v1/completions", json={"model": "eyas/fake", "prompt": prompt})
    assert engine.requests[-1].max_tokens == 10


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "unknown_route"),
        ("POST", "/v1/completions/", 404, "unknown_route"),
        ("GET", "/", 404, "unknown_route"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
    ],
)
async def test_wrong_routes(client, method, path, status, code):
    """Catches plain-text or HTML errors, and redirects to an address only the replica has."""
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "allow" in response.headers if status == 405 else True


async def test_models(client):
    """Catches a model id with a slash that cannot be looked up."""
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["eyas/fake"]
    assert listed["data"][0]["max_model_len"] == 200
    assert (await client.get("/v1/models/eyas/fake")).json() == listed["data"][0]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (EngineHealth("ok", num_running=2, num_waiting=1), 200),
        (EngineHealth("degraded", "the drafter restarts"), 200),
        (EngineHealth("starting"), 503),
        (EngineHealth("down", "no step for 5 s"), 503),
    ],
)
async def test_health(client, engine, state, status):
    """Catches a health route that stays green while nothing is served, or turns red without its drafter."""
    engine.state = state
    response = await client.get("/health")
    assert response.status_code == status
    assert response.json() == {
        "status": state.status,
        "reason": state.reason,
        "model": "eyas/fake",
        "requests_running": state.num_running,
        "requests_waiting": state.num_waiting,
    }


async def test_metrics_route(client):
    """Catches a content type Prometheus refuses, and requests that are not counted."""
    await client.post("/v1/chat/completions", json=CHAT)
    response = await client.get("/metrics")
    assert response.headers["content-type"].count("charset") == 1
    assert 'eyas_requests_total{outcome="stop"} 1.0' in response.text
    assert "eyas_tokens_emitted_total 15.0" in response.text


async def test_openapi_page_documents_the_bodies(client):
    """Catches routes shown as taking no body, and references to schemas that are not there."""
    page = (await client.get("/openapi.json")).json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "temperature" in schema["properties"]
        pointers = [part.split('"')[0] for part in json.dumps(schema).split('"$ref": "#/')[1:]]
        assert pointers
        for pointer in pointers:
            target = page
            for key in pointer.split("/"):
                target = target[key.replace("~1", "/")]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (QueueFullError("The queue is full.", retry_after_s=4), 429, "queue_full"),
        (EngineDownError("The engine restarts."), 503, "engine_down"),
        (GenerationError("Logits are not finite."), 500, "generation_failed"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_engine_errors_before_any_token(client, engine, failure, status, code, is_streamed):
    """Catches a stream that answers 200 and only then fails, and internals told to the client."""
    engine.failure = failure
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": is_streamed})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == {429: "4", 503: "1"}.get(status)
    engine.failure = None
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_engine_error_midway_ends_the_stream_with_an_error_event(client, engine, sse_data):
    """Catches a broken stream that looks finished, or a connection just cut."""
    engine.failure, engine.fail_after = GenerationError("Logits are not finite."), 2
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    *chunks, last = map(json.loads, sse_data(response.text))
    assert response.status_code == 200
    assert len(chunks) > 1
    assert last["error"]["message"] == "Logits are not finite."


async def test_engine_error_midway_fails_a_whole_answer(client, engine):
    """Catches half an answer passed off as a whole one."""
    engine.failure, engine.fail_after = GenerationError("Logits are not finite."), 2
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert engine.num_open == 0


async def test_concurrent_requests_are_independent(client, engine):
    """Catches state shared between requests."""
    bodies = [{**TEXT, "max_tokens": count, "stop": []} for count in range(1, 9)]
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    expected = [ANSWER.encode()[:count].decode(errors="ignore") for count in range(1, 9)]
    assert texts == expected
    assert engine.num_open == 0


@pytest.mark.parametrize(("path", "fields"), ROUTES)
async def test_events_arrive_one_by_one(context, engine, path, fields):
    """Catches a response that is buffered until the answer is complete."""
    engine.hang_after = 2
    async with served(context) as client, client.stream("POST", path, json={**fields, "stream": True}) as response:
        assert response.headers["x-request-id"]
        text = ""
        async for line in response.aiter_lines():
            if line:
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if text == ANSWER[:4]:
                break
        assert engine.num_open == 1


@pytest.mark.parametrize("hang_after", [0, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_disconnect_cancels_the_request(context, engine, is_streamed, hang_after):
    """Catches pages held for clients that have gone: before the first token or later, streamed or not."""
    engine.hang_after = hang_after
    async with served(context) as client:
        with pytest.raises(httpx2.TimeoutException):
            await client.post("/v1/chat/completions", json={**CHAT, "stream": is_streamed}, timeout=0.2)
        await until(lambda: engine.num_open == 0)
        assert engine.cancelled == [engine.requests[0].request_id]
        engine.hang_after = None
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert context.metrics.registry.get_sample_value("eyas_requests_total", {"outcome": "cancelled"}) == 1


async def test_cancelled_handler_cancels_the_request(client, engine):
    """Catches a request that goes on after the server cancelled its handler, as Ray Serve does."""
    engine.hang_after = 1
    task = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
    await until(lambda: engine.num_open == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_open == 0


async def test_disconnect_while_the_body_is_sent(context, engine):
    """Catches a server error for a client that leaves before its request is complete."""
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    with contextlib.suppress(ClientDisconnect):
        await build_api(context)(scope, receive, send)
    assert engine.requests == []
    assert all(message.get("status") in (None, 499) for message in sent)


async def test_request_id_can_be_left_to_the_proxy(context):
    """Catches the header sent twice behind Ray Serve's proxy."""
    api = build_api(dataclasses.replace(context, echoes_request_id=False))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=api), base_url="http://eyas") as client:
        response = await client.get("/health", headers={"x-request-id": "abc"})
    assert "x-request-id" not in response.headers


def test_context_is_complete_without_settings(context):
    """Catches defaults that only the tests set."""
    plain = ApiContext(
        model="m",
        tokenizer=context.tokenizer,
        engine=context.engine,
        metrics=context.metrics,
        context_length=10,
    )
    assert (plain.default_chat_tokens, plain.echoes_request_id) == (1024, True)


async def test_token_ids_without_an_embedding_are_refused(context):
    """Catches an added token that the tokenizer knows and the model does not: its lookup would end every request."""
    api = build_api(dataclasses.replace(context, vocab_size=ord("x")))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=api), base_url="http://eyas") as client:
        response = await client.post("/v1/completions", json={**TEXT, "prompt": "wxw"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        assert (await client.post("/v1/completions", json={**TEXT, "prompt": "www"})).status_code == 200
