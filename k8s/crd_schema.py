"""Turns KubeRay's RayService CRD into a small JSON Schema that also rejects unknown fields.

    python -m eyas.k8s.crd_schema ray.io_rayservices.yaml > k8s/schema/rayservice-v1.schema.json

The API server prunes unknown fields in silence and fills in defaults before it validates. Here an object with listed
properties admits no others, and a field with a default is not required. Descriptions, formats, list keys, CEL rules and
the status are left out; subschemas that occur more than once move to `$defs`.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

VERSION = "v1"
SCHEMA_PATH = Path(__file__).with_name("schema") / "rayservice-v1.schema.json"
ORIGIN = (
    "Derived by Eyas (k8s/crd_schema.py) from ray-operator/config/crd/bases/ray.io_rayservices.yaml of "
    "https://github.com/ray-project/kuberay, tag v1.7.0, commit 59d663aeec13760646da3db9c1cf8cfe883e30b7. "
    "Copyright the KubeRay authors, Apache License 2.0. Changed: reduced to the v1 spec without descriptions, "
    "objects closed to unknown fields."
)
KEPT_KEYWORDS = {"enum", "maxLength", "minLength", "minimum", "pattern"}
# A smaller subschema takes no more room than the reference to it.
MIN_SHARED_CHARS = 200


def rayservice_schema(crd: Schema) -> Schema:
    """The JSON Schema (draft 2020-12) of a RayService manifest; `crd` is the parsed CRD file and is not changed."""
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == VERSION)
    root = closed(version["schema"]["openAPIV3Schema"])
    del root["properties"]["status"]
    root["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{VERSION}"}
    root["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
    root["required"] = ["apiVersion", "kind", "metadata", "spec"]
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": ORIGIN}
    return header | with_shared_definitions(root)


def closed(schema: Schema) -> Schema:
    """The plain JSON Schema of a structural OpenAPI schema, with its objects closed to unknown fields."""
    result: Schema = {key: value for key, value in schema.items() if key in KEPT_KEYWORDS}
    properties: dict[str, Schema] = schema.get("properties", {})
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    elif "type" in schema:
        result["type"] = [schema["type"], "null"] if schema.get("nullable") else schema["type"]
    if properties:
        result["properties"] = {name: closed(value) for name, value in properties.items()}
        result["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = closed(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = closed(schema["items"])
    required = [name for name in schema.get("required", []) if "default" not in properties.get(name, {})]
    if required:
        result["required"] = required
    return result


def with_shared_definitions(root: Schema) -> Schema:
    """The same schema with every repeated subschema written once, under `$defs`."""
    num_uses: Counter[str] = Counter()

    def count(schema: Schema) -> None:
        text = canonical(schema)
        num_uses[text] += 1
        if num_uses[text] == 1:
            for _, child in subschemas(schema):
                count(child)

    definitions: dict[str, Schema] = {}
    text_to_name: dict[str, str] = {}

    def reference(name: str, schema: Schema) -> Schema:
        text = canonical(schema)
        if num_uses[text] == 1 or len(text) < MIN_SHARED_CHARS:
            return rewritten(schema)
        if text not in text_to_name:
            num_namesakes = sum(taken.split("-")[0] == name for taken in definitions)
            text_to_name[text] = f"{name}-{num_namesakes + 1}" if num_namesakes else name
            definitions[text_to_name[text]] = {}
            definitions[text_to_name[text]] = rewritten(schema)
        return {"$ref": f"#/$defs/{text_to_name[text]}"}

    def rewritten(schema: Schema) -> Schema:
        result = dict(schema)
        if "properties" in schema:
            result["properties"] = {name: reference(name, child) for name, child in schema["properties"].items()}
        for keyword in ("items", "additionalProperties"):
            if isinstance(schema.get(keyword), dict):
                result[keyword] = reference(keyword, schema[keyword])
        return result

    count(root)
    return rewritten(root) | {"$defs": definitions}


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield from schema.get("properties", {}).items()
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield keyword, schema[keyword]


def canonical(schema: Schema) -> str:
    return json.dumps(schema, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the JSON Schema of a RayService for KubeRay's CRD file.")
    parser.add_argument("crd", type=Path)
    crd = yaml.safe_load(parser.parse_args().crd.read_text())
    print(json.dumps(rayservice_schema(crd), indent=1))


if __name__ == "__main__":
    main()
