"""The whole path: `eyas serve` as a user starts it, spoken to over HTTP with the official client."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(900)]

START_TIMEOUT_S = 600
MODEL = "SmolLM2-135M-Instruct"
QUESTIONS = [
    "Name three rivers.",
    "Explain photosynthesis to a ten-year-old, and mention chlorophyll, light, water and carbon dioxide.",
    "Why is the sea salty?",
    "Write a haiku about rain.",
    "What is 12 times 12?",
    "Give me a recipe for pancakes with flour, milk, two eggs, a pinch of salt and a little butter for the pan.",
    "Hello!",
    "Describe a busy railway station at dawn.",
]


class Server:
    """A running `eyas serve` and clients for it."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=300, max_retries=0)

    def ask(self, question: str, max_tokens: int, **options: object) -> str:
        answer = self.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            **{"temperature": 0, **options},  # type: ignore[call-overload]
        )
        content: str = answer.choices[0].message.content
        return content

    def metric(self, name: str) -> float:
        text = httpx2.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"{name} is not among the metrics"
        return float(found.group(1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    command = [str(Path(sys.executable).with_name("eyas")), "serve", "--dtype", "float32", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ctrl-C stops" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield Server(port, log)
    finally:
        process.terminate()
        process.wait(timeout=120)


def test_start_shows_url_curl_and_a_real_answer(server: Server) -> None:
    """A newcomer left without the next thing to type, or figures that were never measured."""
    shown = server.log.read_text()
    assert f"{server.url}/v1" in shown
    assert "curl http" in shown
    assert re.search(r"acceptance length \d+\.\d+, \d+\.\d+ tokens/s", shown)


def test_openai_client_chat_stream_and_completion(server: Server) -> None:
    """The three calls every client makes, and that streaming adds up to the plain answer."""
    question = "Why is the sky blue?"
    plain = server.ask(question, 32)
    chunks = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == plain
    assert usage is not None
    assert usage.completion_tokens == 32
    assert usage.model_extra is not None
    assert usage.model_extra["eyas"]["acceptance_length"] > 1.0
    completion = server.client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert completion.choices[0].text
    assert [model.id for model in server.client.models.list()] == [MODEL]


def test_seeds_fix_sampled_texts(server: Server) -> None:
    """A seed that does not reach the sampler, or noise that depends on the batch."""
    first = server.ask("Write a haiku about rain.", 24, temperature=1.0, seed=5)
    assert server.ask("Write a haiku about rain.", 24, temperature=1.0, seed=5) == first
    assert server.ask("Write a haiku about rain.", 24, temperature=1.0, seed=6) != first


def test_concurrent_requests_equal_alone_and_a_cancelled_one_frees_its_pages(server: Server) -> None:
    """Requests of different lengths that leak into each other, and pages that outlive a client, on either worker."""
    lengths = [8 + 6 * index for index in range(len(QUESTIONS))]
    alone = [server.ask(question, length) for question, length in zip(QUESTIONS, lengths, strict=True)]
    free_at_start = [server.metric(f'eyas_pages_free{{worker="{worker}"}}') for worker in ("target", "drafter")]

    def cancelled(question: str) -> str:
        stream = server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=800, temperature=0, stream=True
        )
        next(iter(stream))
        held = server.metric('eyas_pages_free{worker="target"}')
        stream.close()
        assert held < free_at_start[0]
        return ""

    with ThreadPoolExecutor(len(QUESTIONS) + 1) as pool:
        leaving = pool.submit(cancelled, "Tell me a very long story.")
        together = list(pool.map(server.ask, QUESTIONS, lengths))
        leaving.result()
    assert together == alone
    deadline = time.monotonic() + 30
    while True:
        free = [server.metric(f'eyas_pages_free{{worker="{worker}"}}') for worker in ("target", "drafter")]
        if free == free_at_start:
            break
        assert time.monotonic() < deadline, f"pages free: {free}, at start {free_at_start}"
        time.sleep(0.2)


BAD_BODIES = [
    ({"messages": []}, "messages"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"model": "gpt-5"}, "model"),
    ({"messages": [{"role": "user", "content": "long " * 9000}]}, "messages"),
    ({"temperature": "hot"}, "temperature"),
]


@pytest.mark.parametrize(("change", "field"), BAD_BODIES, ids=[field for _, field in BAD_BODIES])
def test_bad_requests_are_refused_by_name(server: Server, change: dict[str, object], field: str) -> None:
    """A 500 or a stack trace for the client's own mistake."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **change}
    response = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert field in f"{error['param']} {error['message']}"
    assert server.ask("Hello!", 4)


def test_malformed_json_is_refused_and_the_server_goes_on(server: Server) -> None:
    """A parser's error text or a broken replica."""
    response = httpx2.post(
        f"{server.url}/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}, timeout=60
    )
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]
    assert httpx2.get(f"{server.url}/health", timeout=30).json()["status"] == "ok"
