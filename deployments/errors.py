"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`.

A bad request is told the field and what is wrong with its value; the server's own failures go to its log alone.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from eyas.deployments.api_error import ApiError
from eyas.deployments.engine_client import EngineDownError, EngineError, QueueFullError

logger = logging.getLogger("eyas.deployments")

CLIENT_CLOSED_REQUEST = 499
MAX_REPORTED_PROBLEMS = 5


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`; one nobody foresaw is logged in full and told as a bare 500."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case EngineDownError():
            return ApiError(503, str(error), code="engine_down", headers={"Retry-After": "1"})
        case EngineError():
            return ApiError(500, str(error), code="generation_failed")
        case _:
            logger.error("unexpected error while serving a request", exc_info=error)
            return ApiError(500, "The server failed on this request; its log says why.", code="internal_error")


def from_validation_problems(problems: Sequence[Any], known_fields: Collection[str] = ()) -> ApiError:
    """A 400 from pydantic's list of problems; the first one gives `param` and `code`."""
    described = [_describe(problem, known_fields) for problem in problems[:MAX_REPORTED_PROBLEMS]]
    param = described[0][0]
    code = "unsupported_parameter" if problems[0]["type"] == "unsupported_parameter" else "invalid_value"
    if problems[0]["type"] == "extra_forbidden":
        code = "unknown_parameter"
    return ApiError(400, "; ".join(f"{where}: {what}" for where, what in described), param, code)


def _describe(problem: Mapping[str, Any], known_fields: Collection[str]) -> tuple[str, str]:
    """The field as a client would write it, and what is wrong with its value in plain words."""
    location = problem["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".") or "body"
    context = problem.get("ctx", {})
    given = describe_value(problem.get("input"))
    match problem["type"]:
        case "missing":
            what = "is required"
        case "extra_forbidden":
            name = str(location[-1])
            # Matching takes long on long strings, and the client chooses this one.
            is_typo = len(location) == 1 and len(name) < 2 * max(map(len, known_fields), default=0)
            close = difflib.get_close_matches(name, known_fields, 1) if is_typo else []
            what = f"is not a field Eyas knows; did you mean {close[0]}?" if close else "is not a field Eyas knows"
        case "string_type":
            what = f"must be a string, not {given}"
        case "int_type":
            what = f"must be an integer, not {given}"
        case "float_type" | "finite_number":
            what = f"must be a finite number, not {given}"
        case "bool_type":
            what = f"must be true or false, not {given}"
        case "list_type":
            what = f"must be a list, not {given}"
        case "model_type" | "dict_type" | "model_attributes_type":
            what = f"must be a JSON object, not {given}"
        case "literal_error":
            what = f"must be {context['expected']}, not {given}"
        case "greater_than_equal":
            what = f"must be at least {context['ge']}, got {given}"
        case "greater_than":
            what = f"must be above {context['gt']}, got {given}"
        case "less_than_equal":
            what = f"must be at most {context['le']}, got {given}"
        case "less_than":
            what = f"must be below {context['lt']}, got {given}"
        case "too_short" | "string_too_short":
            what = "must not be empty"
        case "too_long":
            what = f"must have at most {context['max_length']} entries, got {context['actual_length']}"
        case "string_too_long":
            what = f"must have at most {context['max_length']} characters"
        case _:
            what = str(problem["msg"])
    return where, what


def describe_value(value: object) -> str:
    """A JSON value in words, short enough for an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the string {value!r}" if len(value) <= 40 else f"the string {value[:37]!r}..."
        case int() | float():
            # Python refuses to print integers of more than some thousand digits.
            return str(value) if isinstance(value, float) or abs(value) < 1 << 128 else "a number that large"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return type(value).__name__


def install_error_handlers(api: FastAPI) -> None:
    """Make every failure of `api`'s routes, and every path it has no route for, answer with OpenAI's error JSON."""

    def on_known_error(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"There is no route {request.method} {request.url.path}.",
            405: f"{request.url.path} does not take {request.method}.",
        }.get(error.status_code, error.detail)
        code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # FastAPI puts the part of the request (body, query, path) before the field's own name.
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        return from_validation_problems(problems).response()

    def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    api.add_exception_handler(ApiError, on_known_error)
    api.add_exception_handler(EngineError, on_known_error)
    api.add_exception_handler(HTTPException, on_http_exception)
    api.add_exception_handler(RequestValidationError, on_validation_error)
    api.add_exception_handler(ClientDisconnect, on_disconnect)
