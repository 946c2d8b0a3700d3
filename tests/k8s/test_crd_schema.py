import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from eyas.k8s.crd_schema import SCHEMA_PATH, closed, rayservice_schema, with_shared_definitions

# Where KubeRay's own files lie beside a checkout that has them.
FULL_CRD = Path(__file__).parents[3] / "shared" / "crds" / "ray.io_rayservices.yaml"
MAX_SCHEMA_BYTES = 200_000


def committed() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(SCHEMA_PATH.read_text())
    return schema


def test_the_committed_schema_is_valid_and_small() -> None:
    Draft202012Validator.check_schema(committed())
    assert SCHEMA_PATH.stat().st_size < MAX_SCHEMA_BYTES


def test_the_committed_schema_names_its_origin() -> None:
    for fact in ("kuberay", "v1.7.0", "59d663aeec13760646da3db9c1cf8cfe883e30b7", "Apache License 2.0", "Changed"):
        assert fact in committed()["$comment"]


def test_every_reference_resolves() -> None:
    text = SCHEMA_PATH.read_text()
    for name in committed()["$defs"]:
        assert f'"#/$defs/{name}"' in text
    assert text.count('"$ref": "#/$defs/') == sum(
        text.count(f'"$ref": "#/$defs/{name}"') for name in committed()["$defs"]
    )


def test_the_committed_schema_is_the_one_of_the_full_crd() -> None:
    if not FULL_CRD.exists():
        pytest.skip(f"KubeRay's CRD files are not beside this checkout ({FULL_CRD})")
    assert committed() == rayservice_schema(yaml.load(FULL_CRD.read_text(), yaml.CSafeLoader))


def test_unknown_fields_are_refused_and_free_maps_are_not() -> None:
    schema = closed(
        {
            "type": "object",
            "properties": {
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "size": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
                "anything": {"type": "object"},
            },
        }
    )
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"labels": {"any": "label"}, "size": "1Gi", "anything": {"at": "all"}})
    assert validator.is_valid({"size": 1})
    assert not validator.is_valid({"label": {}})
    assert not validator.is_valid({"labels": {"any": 1}})
    assert not validator.is_valid({"size": 1.5})


def test_fields_with_a_default_may_be_left_out() -> None:
    properties = {"given": {"type": "integer"}, "defaulted": {"type": "integer", "default": 0}}
    schema = closed({"type": "object", "properties": properties, "required": ["defaulted", "given"]})
    assert schema["required"] == ["given"]


def test_sharing_changes_no_verdict() -> None:
    """The repeated part is nested in another repeated part, and two different parts share a name."""
    leaf = {"type": "object", "properties": {f"field{i}": {"type": "integer"} for i in range(20)}}
    branch = {"type": "object", "properties": {"pod": leaf, "other": {"type": "array", "items": leaf}}}
    namesake = {"type": "object", "properties": {f"text{i}": {"type": "string"} for i in range(20)}}
    root = closed(
        {
            "type": "object",
            "properties": {
                "one": branch,
                "two": branch,
                "left": {"type": "object", "properties": {"pod": namesake}},
                "right": {"type": "object", "properties": {"pod": namesake}},
            },
        }
    )
    shared = with_shared_definitions(root)
    assert len(shared["$defs"]) >= 3
    for instance in (
        {"one": {"pod": {"field1": 1}}, "right": {"pod": {"text1": "a"}}},
        {"one": {"pod": {"field1": "a"}}},
        {"two": {"other": [{"field1": 1, "field99": 1}]}},
        {"left": {"pod": {"field1": 1}}},
        {"right": {"pod": {"text1": 1}}},
    ):
        assert Draft202012Validator(shared).is_valid(instance) == Draft202012Validator(root).is_valid(instance)
