"""What tests share: a byte-level tokenizer and an engine without a model, for everything the HTTP surface does; a
target and a head that often agree, for what is told about drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from eyas.deployments.api_error import ApiError
from eyas.deployments.engine_client import EngineHealth, GenerationEvent, GenerationRequest
from eyas.deployments.ingress import ApiContext, build_api
from eyas.deployments.metrics import Metrics
from eyas.deployments.text_stream import TextStream
from eyas.models.attention import Attention
from eyas.models.head import Candidates, DraftHead, Ranker
from eyas.models.target_loading import load_target_decoder
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.target import TargetRunner

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


class FollowingHead(DraftHead):
    """Guesses from the newest token alone; right as often as a target guesses alike that does the same.

    Args:
        logits: of the token after each token, `[V, V]`.
    """

    capture = (1,)
    cache = None

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.state_size = logits.shape[0]
        self.candidate_ids = torch.arange(logits.shape[0])
        self.dtype, self.device = torch.float32, logits.device

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return torch.nn.functional.one_hot(token_ids, self.state_size).float()

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return self.extend(states, token_ids, positions, attention)

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        return ranker.rank(states @ self.logits, self.candidate_ids)


@dataclass(frozen=True)
class Following:
    """A target whose next token depends on the newest one alone, and a head that is right in most cases."""

    target_folder: Path
    head_folder: Path
    head: FollowingHead

    def workers(self, layout: PoolLayout) -> LocalWorkers:
        model = load_target_decoder(self.target_folder, torch.float32, torch.device("cpu"), None)
        return LocalWorkers(TargetRunner(model, layout, self.head.capture), DraftRunner(self.head, layout))


@pytest.fixture(scope="session")
def following(tiny_models: Any) -> Following:
    """With a byte tokenizer and a chat template; the head's files are a random head's."""
    target = tiny_models.target(vocab_size=260, layer_gain=0.0, num_hidden_layers=6, max_position_embeddings=512)
    _save_byte_tokenizer(target)
    model = load_target_decoder(target, torch.float32, torch.device("cpu"), None)
    rows = torch.arange(260)
    with torch.inference_mode():
        # No layer adds anything, so that every row may attend to itself alone.
        logits = model.logits(model(rows, torch.zeros_like(rows), _attend_to_self, ()).hidden)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    head = FollowingHead(logits + 0.5 * noise)
    return Following(target, tiny_models.head(target), head)


def _attend_to_self(layer: int, query: Tensor, key: Tensor, value: Tensor, options: Any = None) -> Tensor:
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _save_byte_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={x: index for index, x in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = tokenizers.decoders.ByteLevel()
    rust.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>")
    fast.chat_template = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>"
    fast.save_pretrained(folder)
