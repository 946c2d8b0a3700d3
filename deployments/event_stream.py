"""Server-sent events, and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; `ClientDisconnect` if the client goes first.

    Returns or raises only after `work` has come to its end, cancelled if need be. The request's body must have been
    read: nothing but the disconnect message may be left in `receive`.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams `events` and closes them whichever way the response ends.

    The status line waits for the first event, so an exception raised before it can still become an error response.
    Starlette's `StreamingResponse` does neither: it leaves closing to the garbage collector when it is cancelled while
    sending, and under newer ASGI servers it sees a disconnect only when it next sends.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await run_while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            # Nobody is left to answer.
            return

    async def _send_all(self, send: Send) -> None:
        has_started = False
        async for event in self._events:
            if not has_started:
                await _send(
                    send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
                has_started = True
            await _send(send, {"type": "http.response.body", "body": event, "more_body": True})
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error
