"""The implementations a runner computes its steps with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.kernels.attention_backend import AttentionBackend, AttentionGeometry
from eyas.kernels.kernel_set import REFERENCE_KERNELS, KernelSet
from eyas.kernels.reference_attention import ReferenceAttention


@dataclass(frozen=True, slots=True)
class StepBackends:
    """Args:
    kernels: tree operations, sampling, fused elementwise work.
    attention: makes the attention backend of one pool.
    """

    kernels: KernelSet = REFERENCE_KERNELS
    attention: Callable[[AttentionGeometry], AttentionBackend] = ReferenceAttention
