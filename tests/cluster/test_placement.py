import json
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.cluster.placement import (
    ActorResources,
    drafter_resources,
    engine_bundles,
    rank_resources,
    router_resources,
)

PLACED_ENGINE = Path(__file__).with_name("placed_engine.py")
PLACED_ENGINE_TIMEOUT_S = 180


def test_one_gpu() -> None:
    assert engine_bundles(1, 1, 0.1, 1) == [{"CPU": 3.0, "GPU": 1.0}]


def test_one_bundle_per_rank() -> None:
    assert engine_bundles(3, 1, 0.25, 2) == [
        {"CPU": 5.0, "GPU": 1.0},
        {"CPU": 2.0, "GPU": 1.0},
        {"CPU": 2.0, "GPU": 1.0},
    ]


def test_cpu_mode_has_no_gpu_entries() -> None:
    assert engine_bundles(2, 0, 0.1, 1) == [{"CPU": 3.0}, {"CPU": 1.0}]
    assert rank_resources(0, 0, 0.1, 1) == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert drafter_resources(0, 0.1, 1) == {"num_cpus": 1.0, "num_gpus": 0.0}


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("gpus_per_rank", [0, 1])
@pytest.mark.parametrize("drafter_gpu_fraction", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("cpus_per_worker", [0.5, 1, 4])
def test_actors_fill_their_bundles_exactly(
    tensor_parallel_size: int, gpus_per_rank: float, drafter_gpu_fraction: float, cpus_per_worker: float
) -> None:
    """A bundle too small leaves an actor pending for ever; a bundle too large wastes devices."""
    bundles = engine_bundles(tensor_parallel_size, gpus_per_rank, drafter_gpu_fraction, cpus_per_worker)
    actors_by_bundle: list[list[ActorResources]] = [
        [rank_resources(rank, gpus_per_rank, drafter_gpu_fraction, cpus_per_worker)]
        for rank in range(tensor_parallel_size)
    ]
    actors_by_bundle[0] += [
        router_resources(),
        drafter_resources(gpus_per_rank, drafter_gpu_fraction, cpus_per_worker),
    ]
    for bundle, actors in zip(bundles, actors_by_bundle, strict=True):
        assert bundle["CPU"] == pytest.approx(sum(actor["num_cpus"] for actor in actors))
        assert bundle.get("GPU", 0) == pytest.approx(sum(actor["num_gpus"] for actor in actors))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0, 1, 0.1, 1), "tensor_parallel_size must be at least 1"),
        ((1, 2, 0.1, 1), "a rank drives one device"),
        ((1, -1, 0.1, 1), "a rank drives one device"),
        ((2, 0.5, 0.1, 1), "NCCL refuses"),
        ((1, 1, 0, 1), "drafter_gpu_fraction"),
        ((1, 1, 1, 1), "drafter_gpu_fraction"),
        ((1, 0.5, 0.6, 1), "drafter_gpu_fraction"),
        ((1, 1, 0.1, 0), "cpus_per_worker"),
    ],
)
def test_impossible_engines_are_refused(arguments: tuple[int, float, float, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engine_bundles(*arguments)


@pytest.mark.ray
def test_ray_gives_rank_0_and_the_drafter_one_gpu() -> None:
    """Runs in a process of its own, because a process holds one Ray connection and other tests have theirs."""
    run = subprocess.run(
        [sys.executable, PLACED_ENGINE], capture_output=True, text=True, timeout=PLACED_ENGINE_TIMEOUT_S
    )
    assert run.returncode == 0, run.stderr
    gpu_ids = json.loads(run.stdout.splitlines()[-1])
    assert len(gpu_ids["ranks"]) == 3
    assert len(set(gpu_ids["ranks"])) == 3, "two ranks on one GPU"
    assert gpu_ids["drafter"] == gpu_ids["ranks"][0]
    assert gpu_ids["again"] == gpu_ids["first"], "a restarted actor left its bundle"
