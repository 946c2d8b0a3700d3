from __future__ import annotations

import argparse
import sys

import pytest
import torch

from eyas.deployments.rank_options import add_rank_options, check_ranks, run_ranks
from eyas.training.ranks import Ranks


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_rank_options(parser)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "cuda"], "--device: torch sees no CUDA device"),
        (["--ranks", "0"], "--ranks: must be at least 1"),
        (["--ray-workers", "0"], "--ray-workers: must be at least 1"),
        (["--gpus-per-worker", "1"], "add --ray-workers"),
        (["--ray-address", "auto"], "add --ray-workers"),
        (["--ray-workers", "2", "--device", "cuda"], "use --gpus-per-worker 1"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches options that are dropped silently, and a run that dies after its corpus was written for an hour."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=reason):
        check_ranks(parse(*arguments))


def test_every_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two ranks on one GPU, where NCCL hangs or refuses."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_ranks(parse("--device", "cuda", "--ranks", "2"))
    with pytest.raises(ValueError, match="--ranks: 3 ranks need a GPU each, torch sees 2"):
        check_ranks(parse("--device", "cuda", "--ranks", "3"))


def test_without_ray_train_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError of pandas or pyarrow as all that a user is told."""
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    with pytest.raises(ValueError, match=r"pip install 'eyas\[train\]'"):
        check_ranks(parse("--ray-workers", "2"))


def test_one_rank_runs_here_on_its_threads_and_device() -> None:
    """Catches options of a single process that are lost on the way."""
    before = torch.get_num_threads()
    try:
        found = run_ranks(parse("--threads", "3"), lambda ranks: (ranks.size, ranks.device, torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert found == (1, torch.device("cpu"), 3)
    assert Ranks().is_first
