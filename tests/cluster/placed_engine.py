"""Places an engine of three ranks on a local cluster that claims to have GPUs, and prints the GPU ids it was given.

The last line is one JSON object: `ranks` and `drafter` of the first group, `first` and `again` = rank 1 before and
after it is killed and created anew.
"""

import json
from typing import Any

import ray
from ray.util.placement_group import placement_group

from eyas.cluster.placement import (
    DRAFTER_BUNDLE_INDEX,
    PLACEMENT_STRATEGY,
    ActorResources,
    drafter_resources,
    engine_bundles,
    in_bundle,
    rank_resources,
)

READY_TIMEOUT_S = 60
TENSOR_PARALLEL_SIZE, GPUS_PER_RANK, DRAFTER_GPU_FRACTION, CPUS_PER_WORKER = 3, 1, 0.1, 1


class Device:
    def gpu_id(self) -> int:
        (gpu_id,) = ray.get_gpu_ids()
        return int(gpu_id)


DeviceActor: Any = ray.remote(Device)


def main() -> None:
    ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
    group = placement_group(
        engine_bundles(TENSOR_PARALLEL_SIZE, GPUS_PER_RANK, DRAFTER_GPU_FRACTION, CPUS_PER_WORKER),
        strategy=PLACEMENT_STRATEGY,
    )
    ray.get(group.ready(), timeout=READY_TIMEOUT_S)

    def create(resources: ActorResources, bundle_index: int) -> Any:
        return DeviceActor.options(**resources, scheduling_strategy=in_bundle(group, bundle_index)).remote()

    def create_rank(rank: int) -> Any:
        return create(rank_resources(rank, GPUS_PER_RANK, DRAFTER_GPU_FRACTION, CPUS_PER_WORKER), rank)

    drafter = create(drafter_resources(GPUS_PER_RANK, DRAFTER_GPU_FRACTION, CPUS_PER_WORKER), DRAFTER_BUNDLE_INDEX)
    ranks = [create_rank(rank) for rank in reversed(range(TENSOR_PARALLEL_SIZE))][::-1]
    rank_gpu_ids = ray.get([rank.gpu_id.remote() for rank in ranks], timeout=READY_TIMEOUT_S)
    drafter_gpu_id = ray.get(drafter.gpu_id.remote(), timeout=READY_TIMEOUT_S)

    ray.kill(ranks[1])
    ranks[1] = create_rank(1)
    again = ray.get(ranks[1].gpu_id.remote(), timeout=READY_TIMEOUT_S)
    print(json.dumps({"ranks": rank_gpu_ids, "drafter": drafter_gpu_id, "first": rank_gpu_ids[1], "again": again}))


if __name__ == "__main__":
    main()
