"""The operations of one kernel backend under their common signatures: what a step computes with besides attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from eyas.kernels import build, compact, fused, grow, sample, verify
from eyas.kernels.build import MaskEncoding, TreeLayout, TreeLinks
from eyas.kernels.fused import FusedOperations
from eyas.kernels.grow import GrowOperations
from eyas.kernels.interpreter import mend_interpreter
from eyas.kernels.sample import SampledTokens
from eyas.kernels.tree import DraftTrees
from eyas.kernels.verify import AcceptedPaths


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Each field is the function of that name in the reference module it comes from, or does the same."""

    build_layout: Callable[[Tensor, Tensor, Tensor, MaskEncoding, int | None], TreeLayout]
    verify_walk: Callable[[DraftTrees, TreeLinks, Tensor, int], AcceptedPaths]
    compact: Callable[[Tensor, Tensor, Tensor], None]
    sample_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], SampledTokens]
    perturb: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    grow: GrowOperations
    fused: FusedOperations


REFERENCE_KERNELS = KernelSet(
    build_layout=build.build_layout,
    verify_walk=verify.verify_walk,
    compact=compact.compact,
    sample_tokens=sample.sample_tokens,
    perturb=sample.perturb,
    grow=grow.REFERENCE_OPERATIONS,
    fused=fused.REFERENCE,
)


def load_kernels(name: str) -> KernelSet:
    """The set called `reference` or `triton`; Triton is imported only when asked for.

    Raises:
        ValueError: for another name, or where Triton cannot be imported.
    """
    if name == "reference":
        return REFERENCE_KERNELS
    if name != "triton":
        raise ValueError(f"kernel_backend: {name} is not known; use reference or triton")
    mend_interpreter()
    try:
        from eyas.kernels import (
            triton_build,
            triton_compact,
            triton_fused,
            triton_grow,
            triton_sample,
            triton_verify,
        )
    except ImportError as error:
        raise ValueError(
            f"kernel_backend: triton needs the package triton, which cannot be imported ({error}); install eyas[gpu], "
            "or use reference"
        ) from error

    return KernelSet(
        build_layout=triton_build.build_layout,
        verify_walk=triton_verify.verify_walk,
        compact=triton_compact.compact,
        sample_tokens=triton_sample.sample_tokens,
        perturb=triton_sample.perturb,
        grow=triton_grow.OPERATIONS,
        fused=triton_fused.TRITON,
    )
