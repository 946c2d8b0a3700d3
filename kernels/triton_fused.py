"""The operations of `kernels.fused` in Triton, as models take them."""

from __future__ import annotations

from eyas.kernels.fused import FusedOperations
from eyas.kernels.triton_gate import silu_gate
from eyas.kernels.triton_norm import add_rms_norm
from eyas.kernels.triton_rope import rotate_and_store

TRITON = FusedOperations(add_rms_norm, rotate_and_store, silu_gate)
