"""What `eyas serve` leaves running when it ends."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import ray
from ray import serve

from eyas.deployments import local_ray, serving
from eyas.deployments.settings import EngineSettings


@pytest.mark.parametrize(
    ("ray_address", "is_connected", "ended"),
    [
        (None, True, ["serve", "ray"]),
        ("cluster:6379", True, ["application eyas", "ray"]),
        ("cluster:6379", False, []),
    ],
)
def test_a_failed_start_ends_only_what_is_its_own(
    ray_address: str | None, is_connected: bool, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other applications of a shared cluster torn down, or a Ray started only to be shut down."""
    calls: list[str] = []

    def fail(**_: object) -> None:
        raise ConnectionError("no proxy")

    monkeypatch.setattr(EngineSettings, "engine_spec", lambda self: Mock())
    monkeypatch.setattr(serving, "_check_port", lambda host, port: None)
    monkeypatch.setattr(local_ray, "start_ray", lambda bundles, address: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: is_connected)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("ray"))
    monkeypatch.setattr(serve, "start", fail)
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append("serve"))
    monkeypatch.setattr(serve, "delete", lambda name: calls.append(f"application {name}"))
    with pytest.raises(ConnectionError, match="no proxy"):
        serving.serve_once(EngineSettings(), "127.0.0.1", 8000, ray_address)
    assert calls == ended
