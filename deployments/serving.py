"""`eyas serve` and `eyas demo`: bring the application up on Ray Serve, show that it answers, go on or leave."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from eyas.deployments.settings import EngineSettings

APPLICATION = "eyas"
_DEMO_PROMPT = "Explain in a few sentences why the sky is blue."
_DEMO_TOKENS = 96
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # http_proxy is not for one's own server


def serve_forever(settings: EngineSettings, host: str, port: int, ray_address: str | None) -> int:
    """Serve until SIGINT or SIGTERM."""
    stopped = threading.Event()
    with _serving(settings, host, port, ray_address) as console:
        _show_answer(console, settings, host, port)
        # Not before: Ctrl-C must end a slow start too, and Ray sets a handler of its own while it starts.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        console.print("Serving. Ctrl-C stops.")
        stopped.wait()
        console.print("Stopping.")
    return 0


def serve_once(settings: EngineSettings, host: str, port: int, ray_address: str | None) -> int:
    """Serve, answer one prompt over HTTP, leave."""
    with _serving(settings, host, port, ray_address) as console:
        _show_answer(console, settings, host, port)
    return 0


@contextlib.contextmanager
def _serving(settings: EngineSettings, host: str, port: int, ray_address: str | None) -> Iterator[Console]:
    """The application is up and healthy inside the block."""
    console = Console(highlight=False)
    start = time.monotonic()
    _check_port(host, port)
    with console.status("Preparing the model"):
        spec = settings.engine_spec()  # resolves and validates here, where an error is one line, before Ray starts
        if ray_address is None:
            spec.check_device()
    console.print(f"[{time.monotonic() - start:5.1f} s] model {settings.model} is ready on disk")
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from eyas.deployments.app import build
    from eyas.deployments.local_ray import start_ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        with console.status("Starting Ray"):
            start_ray(settings.placement_bundles(), ray_address)
            serve.start(http_options={"host": host, "port": port})
        console.print(f"[{time.monotonic() - start:5.1f} s] Ray Serve is up")
        with console.status("Loading target and drafter"):
            serve.run(build(settings), name=APPLICATION, route_prefix="/")
        console.print(f"[{time.monotonic() - start:5.1f} s] {_engine_line(settings)}")
        url = f"http://{host}:{port}"
        console.print(f"\n{url}/v1   health: {url}/health   metrics: {url}/metrics\n")
        console.print(_curl(settings, url), soft_wrap=True)
        yield console
    finally:
        if ray.is_initialized():
            if ray_address is None:
                serve.shutdown()
            else:
                with contextlib.suppress(RayServeException):  # Serve may not have started
                    serve.delete(APPLICATION)  # other applications of the cluster go on
            ray.shutdown()


def _engine_line(settings: EngineSettings) -> str:
    shape = settings.tree_shape()
    drafting = (
        f"trees of {shape.node_budget} nodes, depth {shape.draft_depth}, width {shape.width}"
        if shape.node_budget > 1
        else "no speculation"
    )
    return f"engine loaded: {settings.tensor_parallel_size} target rank(s), {settings.dtype}, {drafting}"


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ValueError(f"port: must be between 1 and 65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port: {host}:{port} cannot be used: {error.strerror}; pass another --port") from None


def _curl(settings: EngineSettings, url: str) -> str:
    body = json.dumps(
        {"model": settings.model_id, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    )
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


@dataclass(slots=True)
class _StreamedAnswer:
    """What one streamed chat answer brought."""

    text: str = ""
    usage: dict[str, Any] | None = None
    elapsed_s: float = 0.0


def _show_answer(console: Console, settings: EngineSettings, host: str, port: int) -> None:
    console.print(f"\n> {_DEMO_PROMPT}")
    answer = _stream_chat(console, settings, f"http://{host}:{port}")
    if answer.usage is None:
        raise RuntimeError("the server's stream ended without a usage block")
    tokens, extension = answer.usage["completion_tokens"], answer.usage["eyas"]
    length = extension["acceptance_length"]
    console.print(
        f"\n[{tokens} tokens in {extension['steps']} verify steps: acceptance length "
        f"{'-' if length is None else format(length, '.2f')}, {tokens / answer.elapsed_s:.1f} tokens/s]\n",
        markup=False,
    )


def _stream_chat(console: Console, settings: EngineSettings, url: str) -> _StreamedAnswer:
    """One streaming request, printed as it arrives."""
    body = {
        "model": settings.model_id,
        "messages": [{"role": "user", "content": _DEMO_PROMPT}],
        "max_tokens": _DEMO_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = _StreamedAnswer()
    start = time.monotonic()
    with _DIRECT.open(request, timeout=120) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(f"the server answered: {chunk['error']['message']}")
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                answer.text += piece
                console.print(piece, end="", markup=False, soft_wrap=True)
    answer.elapsed_s = time.monotonic() - start
    return answer
