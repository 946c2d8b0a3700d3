"""Which backend an engine gets: the one it names, the first that fits where it leaves the choice, or a refusal.

The choice follows from declarations alone, so that a router without a device and every worker choose alike; of the
process only `TRITON_INTERPRET` is looked at. A backend asked for by name is never replaced by another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import cast

import torch

from eyas.kernels.attention_backend import AttentionBackend, AttentionGeometry
from eyas.kernels.capabilities import ATTENTION_BACKENDS, KERNEL_BACKENDS, AttentionFeature, Capabilities
from eyas.kernels.interpreter import is_interpreting, mend_interpreter

AUTO = "auto"

_log = logging.getLogger("eyas.kernels")


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """What an engine asks of its tree kernels.

    Args:
        device: a type of device, as in `torch.device.type`.
        graph_capture: a CUDA graph is to hold them.
        sizes: see `Capabilities.limits`; those not named are taken to fit.
    """

    device: str
    dtype: torch.dtype
    graph_capture: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionNeed(KernelNeed):
    """What one side of an engine asks of its attention; `side` says whose it is, for messages."""

    side: str = "target"
    head_dim: int = 128
    value_head_dim: int = 128
    page_size: int = 16
    features: frozenset[AttentionFeature] = frozenset()


# What `auto` tries, by device. Of FlashInfer's forms only the one that needs no mask over the prefix.
_AUTO_ATTENTION = {"cpu": ("reference",), "cuda": ("triton", "flashinfer-cascade", "reference")}
_AUTO_KERNELS = {"cpu": ("reference",), "cuda": ("triton", "reference")}

_ATTENTION_CLASSES = {
    "reference": ("eyas.kernels.reference_attention", "ReferenceAttention"),
    "triton": ("eyas.kernels.triton_attention", "TritonAttention"),
    "flashinfer": ("eyas.kernels.flashinfer_attention", "MaskedFlashInfer"),
    "flashinfer-cascade": ("eyas.kernels.flashinfer_attention", "CascadeFlashInfer"),
}


def refusal(backend: Capabilities, need: KernelNeed) -> str | None:
    """Why a backend cannot do what is asked, as the rest of a sentence that begins with its name; None if it can."""
    if need.device not in backend.devices:
        return f"does not run on {need.device}"
    if need.device in backend.interpreted_on and not is_interpreting():
        return f"runs on {need.device} only interpreted, with TRITON_INTERPRET=1 in the environment"
    if need.dtype not in backend.dtypes:
        return f"does not compute in {str(need.dtype).removeprefix('torch.')}"
    for name, size in need.sizes.items():
        if size > backend.limits.get(name, size):
            return f"takes at most {backend.limits[name]} for {name}, not {size}"
    if isinstance(need, AttentionNeed) and (reason := _attention_refusal(backend, need)) is not None:
        return reason
    return "cannot be captured in CUDA graphs" if need.graph_capture and not backend.graph_capture else None


def _attention_refusal(backend: Capabilities, need: AttentionNeed) -> str | None:
    whose, head_dim = f"the {need.side}'s", need.head_dim
    if not backend.value_head_dims and need.value_head_dim != head_dim:
        return f"cannot attend with {whose} heads of {head_dim} and values of {need.value_head_dim}"
    if backend.head_dims is not None and head_dim not in backend.head_dims:
        return f"cannot attend with {whose} heads of {head_dim}, only of {_list(backend.head_dims)}"
    if head_dim > backend.limits.get("head_dim", head_dim):
        return f"cannot attend with {whose} heads of {head_dim}, only up to {backend.limits['head_dim']}"
    if backend.page_sizes is not None and need.page_size not in backend.page_sizes:
        return f"cannot read pages of {need.page_size} tokens, only of {_list(backend.page_sizes)}"
    missing = sorted(need.features - backend.features)
    return f"does not do {whose} {' and '.join(missing)}" if missing else None


def choose_attention(name: str, need: AttentionNeed) -> Capabilities:
    """The attention backend of one side.

    Args:
        name: of a backend, or `auto`, whose choice is logged with its reason.

    Raises:
        ValueError: in one line the setting, why it cannot be, and the nearest that can.
    """
    return _choose("attention_backend", ATTENTION_BACKENDS, _AUTO_ATTENTION.get(need.device, ()), name, need)


def choose_kernels(name: str, need: KernelNeed) -> Capabilities:
    """The backend of everything but attention; see `choose_attention`."""
    return _choose("kernel_backend", KERNEL_BACKENDS, _AUTO_KERNELS.get(need.device, ()), name, need)


def _choose(
    setting: str, backends: Mapping[str, Capabilities], order: tuple[str, ...], name: str, need: KernelNeed
) -> Capabilities:
    if name == AUTO:
        return _first_fit(setting, backends, order, need)
    if name not in backends:
        raise ValueError(f"{setting}: {name} is not known; use one of {', '.join([AUTO, *backends])}")
    reason = refusal(backends[name], need)
    if reason is not None:
        raise ValueError(f"{setting}: {name} {reason}; use {_nearest(backends, order, name, need)}")
    return backends[name]


def _first_fit(
    setting: str, backends: Mapping[str, Capabilities], order: tuple[str, ...], need: KernelNeed
) -> Capabilities:
    reasons = {name: refusal(backends[name], need) for name in order}
    refused = [f"{name} {reason}" for name, reason in reasons.items() if reason is not None]
    fitting = next((name for name, reason in reasons.items() if reason is None), None)
    if fitting is not None:
        whose = f" for the {need.side}" if isinstance(need, AttentionNeed) else ""
        why = "; ".join(refused[: order.index(fitting)]) or f"the first choice on {need.device}"
        _log.info("%s: auto takes %s%s: %s", setting, fitting, whose, why)
        return backends[fitting]
    eager = [name for name in order if refusal(backends[name], replace(need, graph_capture=False)) is None]
    if not eager:
        raise ValueError(f"{setting}: nothing fits: {'; '.join(refused) or f'there is nothing for {need.device}'}")
    capturable = "; ".join(f"{name} {reasons[name]}" for name in order if backends[name].graph_capture)
    raise ValueError(f"cuda_graphs: {capturable}, and no other {setting} can be captured; use --eager ({eager[0]})")


def _nearest(backends: Mapping[str, Capabilities], order: tuple[str, ...], name: str, need: KernelNeed) -> str:
    """Another backend that does as well, the same one without graphs, or the first one without graphs."""
    others = dict.fromkeys([*order, *backends])
    fitting = [other for other in others if refusal(backends[other], need) is None]
    eager_need = replace(need, graph_capture=False)
    eager = [other for other in dict.fromkeys([name, *others]) if refusal(backends[other], eager_need) is None]
    ways = fitting[:1]
    if need.graph_capture and eager and (not fitting or eager[0] == name):
        ways.append(f"{eager[0]} with --eager")
    return ", or ".join(ways) or "another device"


def create_attention(backend: Capabilities, geometry: AttentionGeometry) -> AttentionBackend:
    """Import and make the attention backend that was chosen.

    Raises:
        ValueError: for a geometry it cannot attend with, or a package that cannot be imported.
    """
    need = AttentionNeed(
        device=geometry.device.type,
        dtype=geometry.dtype,
        side="model",
        head_dim=geometry.head_dim,
        value_head_dim=geometry.value_head_dim,
        page_size=geometry.page_size,
    )
    if backend.interpreted_on and need.device not in backend.interpreted_on and is_interpreting():
        raise ValueError(
            f"attention_backend: {backend.name} would run interpreted, not on {need.device}; unset TRITON_INTERPRET"
        )
    reason = refusal(backend, need)
    if reason is not None:
        nearest = _nearest(ATTENTION_BACKENDS, _AUTO_ATTENTION.get(need.device, ()), backend.name, need)
        raise ValueError(f"attention_backend: {backend.name} {reason}; use {nearest}")
    mend_interpreter()
    module, name = _ATTENTION_CLASSES[backend.name]
    try:
        return cast(AttentionBackend, getattr(import_module(module), name)(geometry))
    except ImportError as error:
        packages = " and ".join(backend.packages)
        raise ValueError(
            f"attention_backend: {backend.name} needs {packages}, which cannot be imported ({error}); install "
            "eyas[gpu], or use another one"
        ) from error


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)
