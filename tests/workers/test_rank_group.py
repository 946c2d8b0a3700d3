"""Ranks that find each other, each in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.workers import rank_group
from eyas.workers.rank_group import Rendezvous

RANK = """
import sys
import torch
from eyas.workers.rank_group import Rendezvous, join_group
if len(sys.argv) == 1:
    rendezvous = Rendezvous(2)
    print(rendezvous.address, flush=True)
    parallel = rendezvous.join(2, torch.device("cpu"))
else:
    parallel = join_group(sys.argv[1], 1, 2, torch.device("cpu"))
print(parallel.rank, parallel.size, parallel.sum(torch.tensor([1.0 + parallel.rank])).item())
"""


def start_rank(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RANK, *arguments], stdout=subprocess.PIPE, text=True)


def test_two_processes_join_one_group() -> None:
    """Ranks that wait for each other for ever, or sum with themselves."""
    with start_rank() as first:
        assert first.stdout is not None
        with start_rank(first.stdout.readline().strip()) as second:
            outputs = [rank.communicate(timeout=60)[0].strip() for rank in (first, second)]
    assert outputs == ["0 2 3.0", "1 2 3.0"]


def test_the_host_name_need_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot start on a machine whose own name no resolver knows."""
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert Rendezvous(1).address.startswith("127.0.0.1:")


@pytest.mark.parametrize(("device", "bound"), [("cuda", 0), ("cuda:0", 0), ("cpu", None)])
def test_a_gpu_group_is_bound_to_its_device(device: str, bound: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator made inside the first step, on a device NCCL guessed; a failed collective that nobody notices."""
    joined: dict[str, Any] = {}
    fake_dist = SimpleNamespace(
        init_process_group=lambda backend, **options: joined.update(backend=backend, **options),
        group=SimpleNamespace(WORLD=None),
    )
    monkeypatch.setattr(rank_group, "dist", fake_dist)
    monkeypatch.setattr(rank_group, "TCPStore", lambda *_, **__: SimpleNamespace(port=1))
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    parallel = Rendezvous(2).join(2, torch.device(device))
    assert (parallel.rank, parallel.size) == (0, 2)
    assert joined["backend"] == ("gloo" if bound is None else "nccl")
    assert joined["device_id"] == (None if bound is None else torch.device("cuda", bound))
    assert joined["timeout"].total_seconds() == 120
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == (None if bound is None else "3")
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
