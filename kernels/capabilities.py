"""What each implementation of attention and of the tree kernels can do, as declared: nothing is imported to find out.

`docs/backends.md` shows these declarations as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from eyas.kernels.build import MaskEncoding


class AttentionFeature(StrEnum):
    """What some models ask of attention beyond plain softmax; see `AttentionOptions`."""

    WINDOWS = "sliding windows"
    SOFTCAP = "softcap"
    SINKS = "sinks"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one backend can do.

    Args:
        devices: types of device it runs on.
        interpreted_on: those of them where it runs only through Triton's interpreter, for tests.
        graph_capture: whether a CUDA graph can hold it, and replay it over other lengths.
        packages: what must be importable, beyond torch.
        limits: the most it takes of what the name says: `head_dim`, `hidden_size`, `width`, `draft_depth`,
            `candidates` of a whole draft.
        mask_encoding: what the plans of an attention backend read; None for kernels.
        head_dims, page_sizes: None for any.
        value_head_dims: whether values may have another head dim than keys.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    graph_capture: bool
    interpreted_on: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    mask_encoding: MaskEncoding | None = None
    head_dims: tuple[int, ...] | None = None
    value_head_dims: bool = True
    page_sizes: tuple[int, ...] | None = None
    features: frozenset[AttentionFeature] = frozenset(AttentionFeature)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)

_ATTENTION = (
    Capabilities(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=_FLOATS,
        graph_capture=False,  # it reads lengths on the host and allocates by them
        mask_encoding=MaskEncoding.FULL,
    ),
    Capabilities(
        name="triton",
        devices=("cpu", "cuda"),
        interpreted_on=("cpu",),
        dtypes=_FLOATS,
        graph_capture=True,
        packages=("triton",),
        limits={"head_dim": 256},
        mask_encoding=MaskEncoding.PACKED,
        value_head_dims=False,
    ),
    Capabilities(
        name="flashinfer-cascade",
        devices=("cuda",),
        dtypes=_HALVES,
        graph_capture=False,  # the library plans on the host: a graph would replay the lengths it was captured with
        packages=("flashinfer",),
        mask_encoding=MaskEncoding.TREE_ONLY,
        head_dims=(64, 128, 256),
        value_head_dims=False,
        features=frozenset({AttentionFeature.SOFTCAP, AttentionFeature.SINKS}),
    ),
    Capabilities(
        name="flashinfer",
        devices=("cuda",),
        dtypes=_HALVES,
        graph_capture=False,
        packages=("flashinfer",),
        mask_encoding=MaskEncoding.FULL,
        head_dims=(64, 128, 256),
        value_head_dims=False,
    ),
)

_KERNELS = (
    Capabilities(name="reference", devices=("cpu", "cuda"), dtypes=_FLOATS, graph_capture=False),
    Capabilities(
        name="triton",
        devices=("cpu", "cuda"),
        interpreted_on=("cpu",),
        dtypes=_FLOATS,
        graph_capture=True,
        packages=("triton",),
        limits={"head_dim": 256, "hidden_size": 16384, "width": 32, "draft_depth": 63, "candidates": 4096},
    ),
)

ATTENTION_BACKENDS: Mapping[str, Capabilities] = {backend.name: backend for backend in _ATTENTION}
KERNEL_BACKENDS: Mapping[str, Capabilities] = {backend.name: backend for backend in _KERNELS}
