"""The Serve application: `eyas.deployments.app:build`, for `serve deploy`, KubeRay and `eyas serve`."""

# No postponed annotations here: Serve validates the arguments only if it finds the class itself in the annotation.

from ray.serve import Application

from eyas.cluster.placement import router_resources
from eyas.deployments.router import Router
from eyas.deployments.settings import EngineSettings

_SPARE_REQUESTS = 64


def build(settings: EngineSettings) -> Application:
    """One Router replica and its engine, in one placement group on one node.

    Loads nothing: a wrong model shows when the replica starts. A shape that cannot be grown is refused here.
    """
    settings.tree_shape()
    return Router.options(  # type: ignore[no-any-return, attr-defined]
        placement_group_bundles=settings.placement_bundles(),
        placement_group_strategy="STRICT_PACK",
        ray_actor_options=router_resources(),
        # Above what the engine takes: when full it refuses the rest with 429 and still answers /health and /metrics.
        max_ongoing_requests=settings.max_batch_size + settings.max_queue_size + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=120,
        health_check_period_s=2,
    ).bind(settings)
