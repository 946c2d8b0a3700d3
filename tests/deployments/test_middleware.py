"""Request ids, and exceptions nobody handled."""

from __future__ import annotations

import httpx2
import pytest
from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

from eyas.deployments.middleware import LastResort, RequestIdEcho

pytestmark = pytest.mark.anyio


@pytest.fixture
def client():
    api = FastAPI()
    api.add_middleware(LastResort)
    api.add_middleware(RequestIdEcho)

    @api.get("/fine")
    async def fine() -> Response:
        return Response("fine", headers={"x-request-id": "from the route"})

    @api.get("/broken")
    async def broken() -> Response:
        raise RuntimeError("secret")

    @api.get("/broken-midway")
    async def broken_midway() -> Response:
        async def body():
            yield b"a"
            raise RuntimeError("secret")

        return StreamingResponse(body())

    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=api), base_url="http://eyas")


async def test_request_id_is_echoed_once(client):
    """Catches losing the id that ties a client's log to ours, and sending it twice."""
    response = await client.get("/fine", headers={"x-request-id": "abc-123"})
    assert response.headers.get_list("x-request-id") == ["abc-123"]


@pytest.mark.parametrize("given", [None, "", "x" * 129, "caf\u00e9".encode("latin-1"), b"a\tb"])
async def test_missing_or_unusable_request_id_is_replaced(client, given):
    """Catches answers without an id, and ids that break logs."""
    headers = {} if given is None else {"x-request-id": given}
    first = (await client.get("/fine", headers=headers)).headers["x-request-id"]
    second = (await client.get("/fine", headers=headers)).headers["x-request-id"]
    assert len(first) == 32
    assert first != second


async def test_unhandled_exception_is_a_json_500_with_the_request_id(client, caplog):
    """Catches plain-text 500s, leaked messages, and faults the log does not show."""
    response = await client.get("/broken", headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "abc"
    assert "secret" in caplog.text


async def test_exception_after_the_start_is_not_answered_twice(client):
    """Catches a second status line in the middle of a body."""
    with pytest.raises(RuntimeError, match="secret"):
        await client.get("/broken-midway")
