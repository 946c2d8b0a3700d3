"""Joining the target ranks of one engine into a `torch.distributed` group: NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from eyas.models.parallel import TensorParallel

# For joining, and for every collective after it: a rank whose peer died must not wait for ever.
_TIMEOUT = datetime.timedelta(seconds=120)
# A failed or overdue collective ends the process, which the router sees at once; it then replaces the whole group.
_ASYNC_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")


class Rendezvous:
    """The store through which ranks find each other, on a free port; rank 0 keeps it alive."""

    def __init__(self, num_ranks: int) -> None:
        self._store = TCPStore("0.0.0.0", 0, num_ranks, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    @property
    def address(self) -> str:
        """`host:port` for the other ranks, all on this node; a name of the host might not resolve."""
        return f"127.0.0.1:{self._store.port}"

    def join(self, num_ranks: int, device: torch.device) -> TensorParallel:
        """Enter the group as rank 0; returns when all ranks are in."""
        return _join(self._store, 0, num_ranks, device)


def join_group(address: str, rank: int, num_ranks: int, device: torch.device) -> TensorParallel:
    """Enter the group at rank 0's `address` as `rank`; returns when all ranks are in."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), num_ranks, is_master=False, timeout=_TIMEOUT)
    return _join(store, rank, num_ranks, device)


def _join(store: Store, rank: int, num_ranks: int, device: torch.device) -> TensorParallel:
    if num_ranks == 1:
        return TensorParallel()
    if device.type == "cuda":
        os.environ.setdefault(*_ASYNC_ERROR_HANDLING)
        # Naming the device makes the communicator now, when all ranks are here, not inside the first step. Ray shows
        # every worker one GPU, so a device without an index is the first.
        backend, bound = "nccl", torch.device("cuda", device.index or 0)
    else:
        backend, bound = "gloo", None
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT, device_id=bound)
    return TensorParallel(rank, num_ranks, dist.group.WORLD)
