"""The backends under test: Triton's, which is what `auto` takes on a GPU."""

from __future__ import annotations

from functools import partial

from eyas.kernels.backends import create_attention
from eyas.kernels.capabilities import ATTENTION_BACKENDS
from eyas.kernels.kernel_set import load_kernels
from eyas.workers.step_backends import StepBackends


def backends_called(name: str) -> StepBackends:
    """Kernels and attention `triton`, or `reference`."""
    return StepBackends(load_kernels(name), partial(create_attention, ATTENTION_BACKENDS[name]))
