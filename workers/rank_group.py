"""Joining the target ranks of one engine into a `torch.distributed` group."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from eyas.models.parallel import TensorParallel

_TIMEOUT = datetime.timedelta(seconds=120)


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
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    return TensorParallel(rank, num_ranks, dist.group.WORLD)
