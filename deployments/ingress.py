"""The HTTP surface: OpenAI's routes over an `EngineClient`, as plain functions that close over one context.

No APIRouter, no methods as routes: Ray Serve rewrites those, and its rewriting breaks on newer FastAPI versions. Under
Ray build the app in the replica, by `serve.ingress(function)` or `__serve_build_asgi_app__`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from eyas.deployments.api_error import ApiError
from eyas.deployments.engine_client import EngineClient, GenerationEvent, GenerationRequest
from eyas.deployments.errors import as_api_error, install_error_handlers
from eyas.deployments.event_stream import EventStream, run_while_connected
from eyas.deployments.metrics import Metrics
from eyas.deployments.middleware import LastResort, RequestIdEcho
from eyas.deployments.protocol import (
    BodyT,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    openapi_body,
    parse_body,
)
from eyas.deployments.responses import (
    ChatResponseBuilder,
    JsonObject,
    ResponseBuilder,
    TextResponseBuilder,
    model_card,
    sse_event,
    usage_block,
)
from eyas.deployments.tokenizer import Tokenizer

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class ApiContext:
    """What the routes close over.

    Args:
        model: the one id this endpoint serves.
        context_length: most tokens, prompt and answer together, that one request may hold.
        default_chat_tokens: cap of a chat answer whose request names none; the rest of the context caps it too.
        max_body_bytes: larger request bodies are refused before they are parsed.
        vocab_size: ids of the model; a tokenizer may know more of them than the model has embeddings for.
        echoes_request_id: whether answers carry `x-request-id`; off under Ray Serve, whose proxy adds that header.
    """

    model: str
    tokenizer: Tokenizer
    engine: EngineClient
    metrics: Metrics
    context_length: int
    default_chat_tokens: int = 1024
    max_body_bytes: int = 8 << 20
    vocab_size: int | None = None
    echoes_request_id: bool = True
    created: int = field(default_factory=lambda: int(time.time()))


def build_api(context: ApiContext) -> FastAPI:
    # No slash redirects: behind a proxy they would send clients to the replica's own address.
    api = FastAPI(title="Eyas", redirect_slashes=False)
    install_error_handlers(api)
    api.add_middleware(LastResort)
    if context.echoes_request_id:
        api.add_middleware(RequestIdEcho)

    @api.post(CHAT_PATH, openapi_extra=openapi_body(ChatCompletionRequest, CHAT_PATH))
    async def chat_completions(request: Request) -> Response:
        return await _serve(context, request, ChatCompletionRequest)

    @api.post(COMPLETIONS_PATH, openapi_extra=openapi_body(CompletionRequest, COMPLETIONS_PATH))
    async def completions(request: Request) -> Response:
        return await _serve(context, request, CompletionRequest)

    @api.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(context)]})

    # Model ids hold slashes.
    @api.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        _check_model(context, model)
        return JSONResponse(_model_card(context))

    @api.get("/health")
    async def health() -> Response:
        state = context.engine.health()
        body = {
            "status": state.status,
            "reason": state.reason,
            "model": context.model,
            "requests_running": state.num_running,
            "requests_waiting": state.num_waiting,
        }
        return JSONResponse(body, 200 if state.is_serving else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        text, content_type = context.metrics.exposition()
        # As a header, because Response would append a second charset to a media type.
        return Response(text, headers={"Content-Type": content_type})

    return api


async def _serve(context: ApiContext, request: Request, body_type: type[BodyT]) -> Response:
    """Validate, then generate: streamed or whole."""
    arrived_s = context.metrics.clock_s()
    try:
        raw = await _read_body(request, context.max_body_bytes)
        body = parse_body(body_type, raw, request.headers.get("content-type"))
        _check_model(context, body.model)
        generation = await _generation_request(context, body)
    except ApiError:
        context.metrics.count_request("refused")
        raise
    builder_type = ChatResponseBuilder if isinstance(body, ChatCompletionRequest) else TextResponseBuilder
    builder = builder_type(generation.request_id, int(time.time()), context.model, body.includes_usage)
    events = context.metrics.observe_request(context.engine.generate(generation), arrived_s)
    if body.stream:
        return EventStream(_sse(events, builder, generation))
    return JSONResponse(await run_while_connected(request.receive, _collect(events, builder, generation)))


async def _collect(
    events: AsyncGenerator[GenerationEvent, None], builder: ResponseBuilder, generation: GenerationRequest
) -> JsonObject:
    pieces: list[str] = []
    async with aclosing(events):
        async for event in events:
            pieces.append(event.text)
            if event.finish_reason is not None:
                usage = usage_block(len(generation.prompt_ids), event, generation.sampling.seed)
                return builder.whole("".join(pieces), event.finish_reason, usage)
    raise AssertionError("observed events end with a finish reason")


async def _sse(
    events: AsyncGenerator[GenerationEvent, None], builder: ResponseBuilder, generation: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """The request's events as server-sent ones; an error after the first becomes the last one."""
    has_started = False
    try:
        async with aclosing(events):
            async for event in events:
                chunks = [] if has_started else builder.opening_chunks()
                if event.text:
                    chunks.append(builder.text_chunk(event.text))
                if event.finish_reason is not None:
                    chunks.append(builder.closing_chunk(event.finish_reason))
                    if builder.includes_usage:
                        usage = usage_block(len(generation.prompt_ids), event, generation.sampling.seed)
                        chunks.append(builder.usage_chunk(usage))
                for chunk in chunks:
                    has_started = True
                    yield sse_event(chunk)
    except Exception as error:
        if not has_started:
            raise
        yield sse_event(as_api_error(error).body())
        return
    yield sse_event("[DONE]")


async def _generation_request(context: ApiContext, body: GenerationBody) -> GenerationRequest:
    is_chat = isinstance(body, ChatCompletionRequest)
    prompt_field = "messages" if is_chat else "prompt"
    prompt_ids = await _prompt_ids(context, body)
    _check_vocabulary(context, "stop_token_ids", body.stop_token_ids or [])
    num_left = context.context_length - len(prompt_ids)
    _check_vocabulary(context, prompt_field, prompt_ids)
    if not prompt_ids:
        raise ApiError(400, f"{prompt_field}: holds no token", prompt_field, "invalid_value")
    if num_left < 1:
        raise ApiError(
            400,
            f"{prompt_field}: takes {len(prompt_ids)} tokens, which leaves no room for an answer in this model's "
            f"context of {context.context_length}; shorten it",
            prompt_field,
            "context_length_exceeded",
        )
    if body.token_limit is not None and body.token_limit > num_left:
        raise ApiError(
            400,
            f"{body.token_limit_field}: {body.token_limit} tokens on top of the {len(prompt_ids)} of {prompt_field} "
            f"exceed this model's context of {context.context_length}; ask for at most {num_left}",
            body.token_limit_field,
            "context_length_exceeded",
        )
    default_limit = context.default_chat_tokens if is_chat else DEFAULT_COMPLETION_TOKENS
    return GenerationRequest(
        request_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        prompt_ids=prompt_ids,
        sampling=body.sampling_params(),
        max_tokens=body.token_limit or min(default_limit, num_left),
        stop_strings=tuple(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )


async def _prompt_ids(context: ApiContext, body: GenerationBody) -> list[int]:
    # In a thread: a long prompt takes long enough to stall the streams of everyone else.
    if isinstance(body, ChatCompletionRequest):
        messages = [message.for_template() for message in body.messages]
        return await asyncio.to_thread(context.tokenizer.apply_chat_template, messages)
    assert isinstance(body, CompletionRequest)
    if isinstance(body.prompt, str):
        return await asyncio.to_thread(context.tokenizer.encode, body.prompt)
    return body.prompt


def _check_vocabulary(context: ApiContext, param: str, token_ids: list[int]) -> None:
    largest = max(token_ids, default=0)
    num_ids = min(context.tokenizer.vocab_size, context.vocab_size or context.tokenizer.vocab_size)
    if largest >= num_ids:
        raise ApiError(
            400,
            f"{param}: holds token id {largest}; this model's ids end at {num_ids - 1}",
            param,
            "invalid_value",
        )


def _check_model(context: ApiContext, model: str) -> None:
    if model != context.model:
        raise ApiError(
            404, f"model: there is no model {model!r} here, only {context.model!r}", "model", "model_not_found"
        )


def _model_card(context: ApiContext) -> JsonObject:
    return model_card(context.model, context.created, context.context_length)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise ApiError(413, f"body: is larger than the {max_bytes} bytes taken here", "body", "body_too_large")
    return bytes(body)
