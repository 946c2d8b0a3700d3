"""The engine interface's own small logic."""

from __future__ import annotations

import pytest

from eyas.deployments.engine_client import EngineHealth


@pytest.mark.parametrize(
    ("status", "is_serving"), [("ok", True), ("degraded", True), ("starting", False), ("down", False)]
)
def test_which_states_serve(status, is_serving):
    """Catches taking an endpoint out of rotation only because its drafter is away."""
    assert EngineHealth(status).is_serving is is_serving
