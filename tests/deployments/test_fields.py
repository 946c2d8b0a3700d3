"""Field types by themselves."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from eyas.deployments.fields import MessageText, Prompt, StopStrings, only


def test_only_compares_types_too():
    """Catches False taken for 0 and True for 1, which Python holds equal."""
    zero = TypeAdapter(Annotated[Any, only(0, remedy="leave it out")])
    assert zero.validate_python(0) == 0
    assert zero.validate_python(None) is None
    for value in (False, 0.0, "0", 1):
        with pytest.raises(ValidationError, match="is not supported: leave it out"):
            zero.validate_python(value)


def test_remedies_are_shown_as_written():
    """Catches braces in a remedy being taken for a template."""
    field = TypeAdapter(Annotated[Any, only(remedy="send {this}")])
    with pytest.raises(ValidationError, match="send {this}"):
        field.validate_python(1)


@pytest.mark.parametrize("field", [MessageText, Prompt, StopStrings])
def test_messages_are_plain(field):
    """Catches template braces left in the words a client reads."""
    for value in ({"a": 1}, [{"type": "image"}], [{"type": "text", "text": 5}], 5):
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(field).validate_python(value)
        assert "{" not in caught.value.errors()[0]["msg"]


def test_schemas_show_what_clients_may_send():
    """Catches an OpenAPI page that shows only the form values are turned into."""
    assert {"type": "string"} in TypeAdapter(MessageText).json_schema()["anyOf"]
    assert len(TypeAdapter(Prompt).json_schema()["anyOf"]) == 3
    assert {"type": "null"} in TypeAdapter(StopStrings).json_schema()["anyOf"]
