"""Checks a Serve config (the body of `serve deploy`, and `serveConfigV2` of a RayService) before a cluster sees it.

Ray Serve ignores keys it does not know, so a misspelt one silently leaves a default in force; here it is a problem.
"""

import inspect
import typing
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema


def serve_config_problems(config: Any) -> list[str]:
    """What a cluster would refuse or ignore in a parsed Serve config; imports each application's builder."""
    if not isinstance(config, dict):
        return [f"a Serve config is a mapping, got {type(config).__name__}"]
    problems = list(model_problems(ServeDeploySchema, config, ""))
    for index, application in enumerate(config.get("applications") or []):
        if isinstance(application, dict) and isinstance(application.get("import_path"), str):
            problems += builder_problems(application, f"applications.{index}.")
    return problems


def builder_problems(application: dict[str, Any], place: str) -> Iterator[str]:
    """Problems of `import_path` and `args`, found without calling the builder."""
    import_path = application["import_path"]
    module, _, name = import_path.replace(":", ".").rpartition(".")
    try:
        builder = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"{place}import_path: {import_path}: {error}"
        return
    arguments = list(inspect.signature(builder).parameters.values()) if inspect.isfunction(builder) else []
    if len(arguments) != 1 or not _is_model(arguments[0].annotation):
        yield f"{place}import_path: {import_path} is not a function of one pydantic model, so its args go unchecked"
        return
    yield from model_problems(arguments[0].annotation, application.get("args", {}), f"{place}args.")


def model_problems(model: type[BaseModel], value: dict[str, Any], place: str) -> Iterator[str]:
    """Every unknown key at any depth, and whatever `model` itself refuses."""
    unknown = list(_unknown_keys(model, value, place))
    yield from unknown
    try:
        model.model_validate(value)
    except ValidationError as error:
        for detail in error.errors():
            where = place + ".".join(str(part) for part in detail["loc"])
            if not any(problem.startswith(f"{where}:") for problem in unknown):
                yield f"{where}: {detail['msg']}"


def _unknown_keys(model: type[BaseModel], value: dict[str, Any], place: str) -> Iterator[str]:
    for key, item in value.items():
        if key not in model.model_fields:
            yield f"{place}{key}: unknown key of {model.__name__}"
            continue
        nested = next(_models_in(model.model_fields[key].annotation), None)
        if nested is None:
            continue
        if isinstance(item, dict):
            yield from _unknown_keys(nested, item, f"{place}{key}.")
        elif isinstance(item, list):
            for index, entry in enumerate(item):
                if isinstance(entry, dict):
                    yield from _unknown_keys(nested, entry, f"{place}{key}.{index}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation such as `dict | Model | None` or `list[Model]` admits."""
    if _is_model(annotation):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _is_model(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)
