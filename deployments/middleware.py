"""ASGI middleware around the API: request ids, and an answer to whatever nobody else caught.

Plain ASGI classes: Starlette's function-style middleware hides a client's disconnect from the routes.
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.deployments.errors import as_api_error

MAX_REQUEST_ID_LENGTH = 128


class RequestIdEcho:
    """ASGI middleware: every answer carries the request's `x-request-id`, a new one if the client sent none usable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        is_usable = 0 < len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable()
        request_id = given if is_usable else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class LastResort:
    """ASGI middleware that answers an exception no handler took with a JSON 500.

    Starlette's own last handler sits outside all other middleware and raises again after answering, which would lose
    the request id and make Ray Serve count the replica's call as crashed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if has_started or scope["type"] != "http":
                raise
            await as_api_error(error).response()(scope, receive, send)
