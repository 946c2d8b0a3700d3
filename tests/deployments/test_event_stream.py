"""Streaming and disconnects, against hand-made ASGI servers that behave as old and new ones do."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from eyas.deployments.event_stream import EventStream, run_while_connected

pytestmark = pytest.mark.anyio

SCOPES = [{"type": "http", "asgi": {"spec_version": version}} for version in ("2.3", "2.4")]


class Client:
    """The other end of a connection; `leave` makes `receive` report the disconnect."""

    def __init__(self):
        self.has_left = asyncio.Event()
        self.messages = []
        self.has_data = asyncio.Event()

    def leave(self):
        self.has_left.set()

    async def receive(self):
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.messages.append(message)
        if message.get("body"):
            self.has_data.set()


class Events:
    """A generator that remembers whether it was closed; waits for ever after its last event if asked to."""

    def __init__(self, *events, hangs=False):
        self.events = events
        self.hangs = hangs
        self.is_closed = False

    async def generate(self):
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                yield event
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            # Real engines await while they cancel: closing must be awaited too, not only begun.
            await asyncio.sleep(0)
            self.is_closed = True


@pytest.mark.parametrize("scope", SCOPES)
async def test_whole_stream(scope):
    """Catches a missing end of body, a content length, and proxies left to buffer the events."""
    client, events = Client(), Events(b"a", b"b")
    await EventStream(events.generate())(scope, client.receive, client.send)
    start, *bodies = client.messages
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert headers[b"x-accel-buffering"] == b"no"
    assert [(body["body"], body["more_body"]) for body in bodies] == [(b"a", True), (b"b", True), (b"", False)]
    assert events.is_closed


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("num_before", [0, 1])
async def test_disconnect_while_waiting_for_the_next_event(scope, num_before):
    """Catches a server that notices the disconnect only when it next has something to send."""
    client, events = Client(), Events(*[b"a"] * num_before, hangs=True)
    task = asyncio.ensure_future(EventStream(events.generate())(scope, client.receive, client.send))
    if num_before:
        await client.has_data.wait()
    else:
        await asyncio.sleep(0.01)
    client.leave()
    await asyncio.wait_for(task, 5)
    assert events.is_closed
    assert not any(message.get("more_body") is False for message in client.messages)


@pytest.mark.parametrize("scope", SCOPES)
async def test_disconnect_while_sending_is_blocked(scope):
    """Catches a generator left suspended at its yield when the cancellation arrives inside `send`."""
    client, events = Client(), Events(b"a", hangs=True)

    async def blocked_send(message):
        if message.get("body"):
            client.leave()
            await asyncio.Event().wait()

    await asyncio.wait_for(EventStream(events.generate())(scope, client.receive, blocked_send), 5)
    assert events.is_closed


async def test_send_that_fails_is_a_disconnect():
    """Catches an error logged for every client that leaves a server of the newer kind."""
    events = Events(b"a", hangs=True)

    async def failing_send(message):
        raise OSError("gone")

    await EventStream(events.generate())(SCOPES[1], Client().receive, failing_send)
    assert events.is_closed


async def test_cancelled_server_task_closes_the_events():
    """Catches leaking the request when the server itself cancels the handler, as Ray Serve does."""
    client, events = Client(), Events(b"a", hangs=True)
    task = asyncio.ensure_future(EventStream(events.generate())(SCOPES[0], client.receive, client.send))
    await client.has_data.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events.is_closed


async def test_error_before_the_first_event_comes_before_the_status_line():
    """Catches a 200 already sent when the queue turns out to be full."""
    client, events = Client(), Events(ValueError("full"))
    with pytest.raises(ValueError, match="full"):
        await EventStream(events.generate())(SCOPES[0], client.receive, client.send)
    assert client.messages == []


async def test_work_result_and_error_pass_through():
    """Catches wrapping or losing what the work returned or raised."""

    async def work(result):
        if isinstance(result, Exception):
            raise result
        return result

    assert await run_while_connected(Client().receive, work(5)) == 5
    with pytest.raises(ValueError, match="no"):
        await run_while_connected(Client().receive, work(ValueError("no")))


async def test_work_has_ended_when_the_disconnect_is_reported():
    """Catches returning while the cancelled work still holds its pages."""
    client = Client()
    has_ended = False

    async def work():
        nonlocal has_ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            has_ended = True

    client.leave()
    with pytest.raises(ClientDisconnect):
        await run_while_connected(client.receive, work())
    assert has_ended


async def test_broken_receive_counts_as_a_disconnect():
    """Catches work going on for ever for a client whose proxy has died."""

    async def receive():
        raise ConnectionError("proxy died")

    with pytest.raises(ClientDisconnect):
        await run_while_connected(receive, asyncio.sleep(60))
