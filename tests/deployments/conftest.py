"""A byte-level tokenizer and an engine without a model, for everything the HTTP surface does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence

import httpx2
import pytest

from eyas.deployments.api_error import ApiError
from eyas.deployments.engine_client import EngineHealth, GenerationEvent, GenerationRequest
from eyas.deployments.ingress import ApiContext, build_api
from eyas.deployments.metrics import Metrics
from eyas.deployments.text_stream import TextStream

EOS = 256
CONTEXT_LENGTH = 200
MODEL = "eyas/fake"


class ByteTokenizer:
    """One token per byte, 256 ends the text; broken UTF-8 decodes to replacement characters."""

    eos_token_ids = frozenset({EOS})
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise ApiError(400, "messages: must not begin with the assistant", "messages", "chat_template_error")
        return self.encode("".join(f"{message['role']}:{message['content']}\n" for message in messages))


class FakeEngine:
    """Answers every request with `answer`: one token from the prompt's own pass, then `run_length` per verify step.

    `fail_after` events the error `failure` is raised; `hang_after` events it waits for ever.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.answer: list[int] = [*tokenizer.encode("Hello, wörld!"), EOS]
        self.run_length = 3
        self.failure: Exception | None = None
        self.fail_after = 0
        self.hang_after: int | None = None
        self.state = EngineHealth("ok")
        self.requests: list[GenerationRequest] = []
        self.num_open = 0
        self.cancelled: list[str] = []

    def health(self) -> EngineHealth:
        return self.state

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        stream = TextStream.of_request(self.tokenizer, request)
        runs = [self.answer[:1]] + [
            self.answer[start : start + self.run_length] for start in range(1, len(self.answer), self.run_length)
        ]
        try:
            for num_steps, run in enumerate(runs):
                if self.failure is not None and num_steps == self.fail_after:
                    raise self.failure
                if num_steps == self.hang_after:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                delta = stream.push(run)
                yield GenerationEvent(
                    text=delta.text,
                    token_ids=delta.token_ids,
                    finish_reason=delta.finish_reason,
                    num_steps=num_steps,
                    num_completion_tokens=stream.num_tokens,
                    num_verified_tokens=sum(map(len, runs[1 : num_steps + 1])),
                )
                if delta.finish_reason is not None:
                    return
        finally:
            self.num_open -= 1
            if stream.finish_reason is None:
                self.cancelled.append(request.request_id)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def engine(byte_tokenizer: ByteTokenizer) -> FakeEngine:
    return FakeEngine(byte_tokenizer)


@pytest.fixture
def context(byte_tokenizer: ByteTokenizer, engine: FakeEngine) -> ApiContext:
    return ApiContext(
        model=MODEL,
        tokenizer=byte_tokenizer,
        engine=engine,
        metrics=Metrics(),
        context_length=CONTEXT_LENGTH,
        max_body_bytes=4096,
    )


@pytest.fixture
def client(context: ApiContext) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=build_api(context)), base_url="http://eyas")


@pytest.fixture(scope="session")
def sse_data() -> Callable[[str], list[str]]:
    """Splits an SSE body into its data lines, insisting on the framing."""

    def split(body: str) -> list[str]:
        assert body.endswith("\n\n")
        events = body.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event.removeprefix("data: ") for event in events]

    return split


@pytest.fixture(scope="session")
def sse_chunks(sse_data: Callable[[str], list[str]]) -> Callable[[str], list[dict]]:
    """The JSON of a stream that ended as it should, with `[DONE]`."""

    def parse(body: str) -> list[dict]:
        *chunks, done = sse_data(body)
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    return parse
