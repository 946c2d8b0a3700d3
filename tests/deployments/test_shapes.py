"""Shapes as people write them."""

from __future__ import annotations

import pytest

from eyas.deployments.scheduler import TreeShape
from eyas.deployments.settings import EngineSettings
from eyas.deployments.shapes import parse_shape, shape_name, shape_settings


@pytest.mark.parametrize("text", ["16x5x4", "6x5x1", "1x0x1"])
def test_shapes_are_read_in_order(text: str) -> None:
    """Catches depth and width changing places between the text, the shape and the settings."""
    nodes, depth, width = map(int, text.split("x"))
    shape = parse_shape(f" {text} ")
    assert shape == TreeShape(nodes, depth, width)
    assert shape_name(shape) == text
    if nodes > 1:
        assert EngineSettings(**shape_settings(shape)).tree_shape() == shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16x5", "'16x5' has 2 parts"),
        ("16x5x4x2", "has 4 parts"),
        ("", "has 1 parts"),
        ("ax5x4", "nodes is 'a'"),
        ("16x-5x4", "depth is '-5'"),
        ("16x5x4.0", "width is '4.0'"),
        ("16x5x²", "width is '²'"),
        ("8x0x4", "draft_depth: must be at least 1"),
        ("0x0x1", "node_budget: must be at least 1"),
        ("8x3x0", "width: must be at least 1"),
        ("99x2x2", "99 nodes need 98 candidates"),
    ],
)
def test_a_broken_shape_is_refused_by_its_part(text: str, message: str) -> None:
    """Catches a stack trace, or a refusal that does not say which of three numbers is meant."""
    with pytest.raises(ValueError, match=f"shape: .*{message}"):
        parse_shape(text)
