"""Nothing that is recorded may wait for the device or bring host values to it: a CUDA graph would refuse or freeze it.

Without a GPU this is seen from the operations themselves. Triton's launchers take part; what the interpreter does
inside a kernel does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.kernel_set import load_kernels
from eyas.kernels.static_tree import TreeChoices
from eyas.kernels.triton_attention import TritonAttention
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.step_backends import StepBackends
from eyas.workers.target import TargetRunner

LAYOUT = PoolLayout(num_pages=8, page_size=8)
# item() and bool(); shapes that depend on values; tensors made of Python values.
_READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "lift_fresh")


class HostAccess(RuntimeError):
    """An operation that a recording cannot hold."""


class Refuse(TorchDispatchMode):
    """Raises at any operation that reads or writes host values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or any(name.startswith(read) for read in _READS):
            raise HostAccess(f"{name} inside a recording")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._tolist, torch.Tensor.tolist = (
            torch.Tensor.tolist,
            _refuse_tolist,
        )  # reads a CPU tensor without an operation
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Tensor.tolist = self._tolist


def _refuse_tolist(tensor: torch.Tensor) -> Any:
    raise HostAccess("tolist inside a recording")


class RefusingRecorder:
    """Records under `Refuse`."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with Refuse():
            run()
        return run


@pytest.fixture(autouse=True)
def kernels_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own reading of arguments is no part of a launch."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", apart)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, over the garbage in padding rows
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA device the graphs themselves are recorded")
@pytest.mark.parametrize("shape", [TreeShape(6, 3, 2), TreeShape.fixed(TreeChoices.cartesian([2, 1]))])
def test_recordings_never_touch_the_host(shape: TreeShape, models: Any, new_prior: Any) -> None:
    """Catches a look at a length, a mask as an index, or a list made into a tensor inside a step or a draft."""
    backends = StepBackends(load_kernels("triton"), TritonAttention)
    limits = GraphLimits(2, shape.node_budget, shape.draft_depth, LAYOUT.num_pages, shape.width)
    target = TargetRunner(models.target, LAYOUT, (0, 2), backends)
    target.record_graphs(limits, RefusingRecorder())
    head = copy.copy(models.random_head)
    head.acceptance_prior = new_prior(ranks=1)  # fewer than the width, which takes the longest way
    drafter = DraftRunner(head, LAYOUT, choices=shape.choices, backends=backends)
    drafter.record_graphs(limits, RefusingRecorder())


@pytest.mark.parametrize(
    "read",
    [
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1, 2]),
        lambda x: int(x.max()),
        lambda x: torch.equal(x, x),
    ],
)
def test_host_access_is_seen(read: Callable[[torch.Tensor], Any]) -> None:
    """The check itself: catches a mode that lets through what it is for."""
    x = torch.arange(4)
    with pytest.raises(HostAccess), Refuse():
        read(x)
