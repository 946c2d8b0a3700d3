"""Field types of request bodies: the ones OpenAI lets clients spell in several ways, and the ones Eyas must refuse."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from eyas.deployments.errors import describe_value

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024


def only(*neutral: object, remedy: str) -> AfterValidator:
    """Refuse a field Eyas does not implement unless its value is null or `neutral`, i.e. asks for nothing."""

    def check(value: object) -> object:
        # Types are compared too, because False == 0 and True == 1.
        if value is None or any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            return value
        raise PydanticCustomError("unsupported_parameter", "is not supported: {remedy}", {"remedy": remedy})

    return AfterValidator(check)


def _stop_list(value: object) -> object:
    if value is None:
        return []
    if isinstance(value, str | list):
        return [value] if isinstance(value, str) else value
    raise PydanticCustomError(
        "stop_type", "must be a string or a list of strings, not {given}", {"given": describe_value(value)}
    )


def _message_text(value: object) -> str:
    """Text parts are joined by line breaks, as other open servers do."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "content_type",
            "must be a string or a non-empty list of text parts, not {given}",
            {"given": "an empty list" if value == [] else describe_value(value)},
        )
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "content_part", "takes only parts of type text, with a string under text: this model reads nothing else"
            )
        if len(part) > 2:
            extra = ", ".join(sorted(set(part) - {"type", "text"}))
            raise PydanticCustomError(
                "content_part", "has a part with fields Eyas does not know: {extra}", {"extra": extra}
            )
    return "\n".join(part["text"] for part in value)


def _single_prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and any(isinstance(entry, str | list) for entry in value):
        if len(value) > 1:
            raise PydanticCustomError(
                "prompt_count",
                "must hold exactly one prompt, got {count}: send one request for each",
                {"count": len(value)},
            )
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(entry) is int and entry >= 0 for entry in value):
        return value
    if value == "" or value == []:
        raise PydanticCustomError("prompt_empty", "must not be empty")
    raise PydanticCustomError("prompt_type", "must be a string, a list of one string, or a list of token ids")


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(_stop_list, json_schema_input_type=str | list[StopString] | None),
]
MessageText = Annotated[str, PlainValidator(_message_text, json_schema_input_type=str | list[dict[str, str]])]
Prompt = Annotated[str | list[int], PlainValidator(_single_prompt, json_schema_input_type=str | list[str] | list[int])]
