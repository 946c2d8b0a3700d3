"""Shapes of draft trees as people write them: `nodes x depth x width`, for example 16x5x4."""

from __future__ import annotations

from eyas.deployments.scheduler import TreeShape

_PARTS = ("nodes", "depth", "width")


def parse_shape(text: str) -> TreeShape:
    """A dynamic tree; a width of 1 is a chain, one node is no speculation.

    Raises:
        ValueError: naming the part that is missing, no number, or too small.
    """
    parts = text.strip().split("x")
    if len(parts) != len(_PARTS):
        raise ValueError(f"shape: {text!r} has {len(parts)} parts, needs nodes x depth x width, for example 16x5x4")
    for name, part in zip(_PARTS, parts, strict=True):
        if not part.isascii() or not part.isdigit():
            raise ValueError(f"shape: {text!r}: {name} is {part!r}, which is no whole number")
    nodes, depth, width = map(int, parts)
    try:
        return TreeShape(nodes, depth, width)
    except ValueError as error:
        raise ValueError(f"shape: {text!r}: {error}") from None


def shape_name(shape: TreeShape) -> str:
    """What `parse_shape` reads."""
    return f"{shape.node_budget}x{shape.draft_depth}x{shape.width}"


def shape_settings(shape: TreeShape) -> dict[str, int]:
    """The fields of `EngineSettings` that ask for it."""
    return {"node_budget": shape.node_budget, "draft_depth": shape.draft_depth, "width": shape.width}
