"""The Serve application that manifests and `eyas serve` build."""

from __future__ import annotations

from eyas.deployments.app import build
from eyas.deployments.settings import EngineSettings


def test_the_replica_takes_more_requests_than_its_engine() -> None:
    """Overload that waits in Serve's proxy instead of being refused with 429, and takes /health with it."""
    settings = EngineSettings(max_batch_size=4, max_queue_size=8)
    assert build(settings)._bound_deployment.max_ongoing_requests > 12
