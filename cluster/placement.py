"""Where the actors of one engine go: bundles of its placement group, and what each actor takes from its bundle.

One bundle per target rank, all on one node. Bundle 0 also holds the router replica and the drafter, which shares rank
0's GPU because hidden states pass between the two as device memory. `gpus_per_rank=0` is the CPU mode: the same bundles
without GPU entries, `drafter_gpu_fraction` unused.

Ray grants GPU fractions as bookkeeping only; they do not limit memory. An actor that asks for more than its bundle has
left stays pending without an error, so whoever creates actors waits for them with a timeout.
"""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# The channels between the actors of one engine are device and shared memory of a single node.
PLACEMENT_STRATEGY = "STRICT_PACK"
# Ray Serve places a replica in bundle 0 of its placement group.
ROUTER_BUNDLE_INDEX = 0
DRAFTER_BUNDLE_INDEX = 0
ROUTER_CPUS = 1.0
# Ray counts resources in units of 1/10000.
RESOURCE_DECIMALS = 4


class ActorResources(TypedDict):
    """Keyword arguments for `.options()` of an actor, and for `ray_actor_options` of a deployment."""

    num_cpus: float
    num_gpus: float


def engine_bundles(
    tensor_parallel_size: int, gpus_per_rank: float, drafter_gpu_fraction: float, cpus_per_worker: float
) -> list[dict[str, float]]:
    """The bundles of one engine; bundle `i` belongs to target rank `i`."""
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}")
    if tensor_parallel_size > 1 and gpus_per_rank not in (0, 1):
        raise ValueError(
            f"{tensor_parallel_size} target ranks need a whole GPU each (gpus_per_rank=1) or none (0), got "
            f"{gpus_per_rank}: fractions may land on one GPU, where NCCL refuses to join two ranks"
        )
    _rank_gpus(0, gpus_per_rank, drafter_gpu_fraction)
    if cpus_per_worker <= 0:
        raise ValueError(f"cpus_per_worker must be positive, got {cpus_per_worker}")

    bundles = [{"CPU": float(cpus_per_worker)} for _ in range(tensor_parallel_size)]
    bundles[ROUTER_BUNDLE_INDEX]["CPU"] += ROUTER_CPUS
    bundles[DRAFTER_BUNDLE_INDEX]["CPU"] += cpus_per_worker
    if gpus_per_rank:
        for bundle in bundles:
            bundle["GPU"] = float(gpus_per_rank)
    return bundles


def router_resources() -> ActorResources:
    """No GPU: the router must not initialise CUDA, and the replica would count the engine's GPUs twice."""
    return {"num_cpus": ROUTER_CPUS, "num_gpus": 0.0}


def rank_resources(
    rank: int, gpus_per_rank: float, drafter_gpu_fraction: float, cpus_per_worker: float
) -> ActorResources:
    """What target rank `rank` takes from bundle `rank`."""
    return {
        "num_cpus": float(cpus_per_worker),
        "num_gpus": _rank_gpus(rank, gpus_per_rank, drafter_gpu_fraction),
    }


def drafter_resources(gpus_per_rank: float, drafter_gpu_fraction: float, cpus_per_worker: float) -> ActorResources:
    """What the drafter takes from bundle `DRAFTER_BUNDLE_INDEX`."""
    _rank_gpus(DRAFTER_BUNDLE_INDEX, gpus_per_rank, drafter_gpu_fraction)
    return {"num_cpus": float(cpus_per_worker), "num_gpus": float(drafter_gpu_fraction) if gpus_per_rank else 0.0}


def _rank_gpus(rank: int, gpus_per_rank: float, drafter_gpu_fraction: float) -> float:
    """GPUs of target rank `rank`: the whole bundle, less the drafter's part where they share it."""
    if not 0 <= gpus_per_rank <= 1:
        raise ValueError(f"gpus_per_rank must lie between 0 and 1, got {gpus_per_rank}: a rank drives one device")
    if not gpus_per_rank:
        return 0.0
    if not 0 < drafter_gpu_fraction < gpus_per_rank:
        raise ValueError(
            f"drafter_gpu_fraction must lie between 0 and gpus_per_rank={gpus_per_rank}, got {drafter_gpu_fraction}"
        )
    if rank != DRAFTER_BUNDLE_INDEX:
        return float(gpus_per_rank)
    return round(gpus_per_rank - drafter_gpu_fraction, RESOURCE_DECIMALS)


def in_bundle(placement_group: "PlacementGroup", bundle_index: int) -> "PlacementGroupSchedulingStrategy":
    """The scheduling strategy that pins an actor to one bundle.

    Without an index Ray picks any bundle with room, and ranks land on GPUs in no particular order.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle_index)
