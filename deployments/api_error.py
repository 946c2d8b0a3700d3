"""The error a client is told about; what raises it may run where there is no web server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response


class ApiError(Exception):
    """An error the client is told about; `message` must make sense to someone who sees nothing else."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        from starlette.responses import Response

        # Escaped to ASCII: a message may quote a request's lone surrogate, which has no UTF-8 form.
        return Response(json.dumps(self.body()), self.status, self.headers, media_type="application/json")
