"""Errors: OpenAI's shape, the right status, nothing internal."""

from __future__ import annotations

import json
import logging

import pytest
from pydantic import BaseModel, ValidationError

from eyas.deployments.api_error import ApiError
from eyas.deployments.engine_client import EngineDownError, GenerationError, QueueFullError
from eyas.deployments.errors import as_api_error, describe_value, from_validation_problems


def test_body_has_openai_shape():
    """Catches a key that SDKs read being missing."""
    body = ApiError(400, "seed: wrong", "seed", "invalid_value").body()
    expected = {"message": "seed: wrong", "type": "invalid_request_error", "param": "seed", "code": "invalid_value"}
    assert body == {"error": expected}


@pytest.mark.parametrize(
    ("error", "status", "type_", "code", "retry_after"),
    [
        (QueueFullError("The queue is full.", retry_after_s=2.1), 429, "rate_limit_error", "queue_full", "3"),
        (QueueFullError("The queue is full.", retry_after_s=0.0), 429, "rate_limit_error", "queue_full", "1"),
        (EngineDownError("The engine restarts."), 503, "server_error", "engine_down", "1"),
        (GenerationError("Logits are not finite."), 500, "server_error", "generation_failed", None),
    ],
)
def test_engine_errors(error, status, type_, code, retry_after):
    """Catches overload reported as a fault, a missing or zero Retry-After, and a lost explanation."""
    told = as_api_error(error)
    assert (told.status, told.type, told.code, told.message) == (status, type_, code, str(error))
    assert told.response().headers.get("retry-after") == retry_after


def test_unexpected_errors_are_logged_and_not_told(caplog):
    """Catches leaking internals to clients, and swallowing the trace operators need."""
    with caplog.at_level(logging.ERROR):
        told = as_api_error(RuntimeError("secret path"))
    assert (told.status, told.code) == (500, "internal_error")
    assert "secret" not in json.dumps(told.body())
    assert "secret path" in caplog.text


def test_messages_with_lone_surrogates_can_be_sent():
    """Catches a 500 raised while writing the 400."""
    response = ApiError(400, "\ud800: is not a field Eyas knows").response()
    assert json.loads(response.body)["error"]["message"].startswith("\ud800")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        (1 << 200, "a number that large"),
        ("a", "the string 'a'"),
        ("a" * 1000, "the string '" + "a" * 37 + "'..."),
        ([1], "a list"),
        ({}, "an object"),
    ],
)
def test_values_are_described_briefly(value, words):
    """Catches echoing a whole prompt in an error, and integers Python refuses to print."""
    assert describe_value(value) == words


def test_unforeseen_validation_problems_still_name_the_field():
    """Catches an exception for a kind of problem this module has no words for."""

    class Body(BaseModel):
        day: bytes

    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"day": 5})
    error = from_validation_problems(caught.value.errors())
    assert error.param == "day"
    assert error.message.startswith("day: ")


def test_suggestions_are_not_sought_for_long_names():
    """Catches a request that keeps the event loop busy comparing a megabyte of field name with ours."""
    problem = {"type": "extra_forbidden", "input": 1, "msg": ""}
    near = from_validation_problems([{**problem, "loc": ("max_token",)}], ["max_tokens"])
    far = from_validation_problems([{**problem, "loc": ("max_tokens" * 100_000,)}], ["max_tokens"])
    assert "did you mean max_tokens?" in near.message
    assert "did you mean" not in far.message
