"""Several processes that train one head together: every step each takes a batch of its own, and all move alike.

Rank r's loss L_r is a mean over its own batch, K_r rows of it kept at the first level. All ranks follow the gradient

    sum over r of (K_r / sum of all K) * gradient of L_r

which at the first level is exactly the gradient of the mean over the kept rows of all batches taken as one. It is not
quite that in three respects: the means of later levels, and of a loss of states, are weighted by the rows of the first
level too; and every rank samples the ids that stand for the rest of the vocabulary for its own batch.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

Value = TypeVar("Value")

_CPU = torch.device("cpu")
# Longer than the first rank validates; a rank that dies is noticed by whoever started it, not by this.
_TIMEOUT = datetime.timedelta(minutes=60)


class Ranks:
    """The ranks as seen from one of them; a single one, which has nothing to exchange, by default.

    Every method must be called by all ranks in the same order. With more than one, they use the default group of
    `torch.distributed`.

    Args:
        device: where this rank computes; what it exchanges lies there.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device = _CPU) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that logs, validates and writes files."""
        return self.rank == 0

    def total(self, number: int) -> int:
        """The sum of all ranks' numbers."""
        if self.size == 1:
            return number
        summed = torch.tensor([number], device=self.device)
        dist.all_reduce(summed)
        return int(summed.item())

    def average(self, tensors: Sequence[Tensor], weight: int) -> None:
        """Put the mean over all ranks in the place of `tensors`, in float32; this rank counts `weight`.

        All ranks end with the same bits: the sum of an element is formed in one place and handed out.
        """
        if self.size == 1:
            return
        share = weight / max(1, self.total(weight))
        joined = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]).mul_(share)
        dist.all_reduce(joined)
        for tensor, part in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def average_gradients(self, weights: Iterable[nn.Parameter], values: Tensor, weight: int) -> Tensor:
        """Average the gradients of `weights` as `average` does; returns the mean of `values`, of any shape."""
        if self.size == 1:
            return values
        gradients = []
        for parameter in weights:
            if parameter.grad is None:  # not reached from this rank's batch
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        mean = values.detach().float().clone()
        self.average([*gradients, mean], weight)
        return mean

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Put rank 0's content into the tensors of all."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def agree(self, value: Value) -> Value:
        """Rank 0's value, on all ranks. It is pickled, and its tensors must lie on the CPU."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=self.device)
        return box[0]

    def require_equal(self, tensors: Iterable[Tensor]) -> None:
        """Compare 4-byte tensors bit by bit with those of rank 0.

        Raises:
            RuntimeError: on every rank, naming those whose tensors differ.
        """
        if self.size == 1:
            return
        sums = torch.stack([tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])
        gathered = [torch.empty_like(sums) for _ in range(self.size)]
        dist.all_gather(gathered, sums)
        differing = [rank for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
        if differing:
            raise RuntimeError(
                f"the weights of ranks {differing} are no longer those of rank 0; all ranks must run on processors "
                "and library versions of one kind"
            )


ALONE = Ranks()


@contextmanager
def joined_ranks(rank: int, size: int, device: torch.device, meeting_file: Path) -> Iterator[Ranks]:
    """Enter, as `rank` of `size`, a group of processes of this machine: NCCL between GPUs, Gloo between CPUs.

    Args:
        meeting_file: where the ranks find each other; it must not exist before the first comes, in a folder that no
            other user may write to.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, bound = "nccl", device
    else:
        # The name of the host, which Gloo would look up, may not resolve; and no other machine need reach the ranks.
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        backend, bound = "gloo", None
    store = FileStore(str(meeting_file), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=bound)
    yield Ranks(rank, size, device)
    dist.destroy_process_group()  # not after an error: NCCL would wait for ranks that never come
