"""The choice of backends: what auto takes, what is refused with which words, and the page that documents it."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import flashinfer_double
import pytest
import torch
from parity import DEVICE

from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.backends import AttentionNeed, KernelNeed, choose_attention, choose_kernels, create_attention
from eyas.kernels.capabilities import ATTENTION_BACKENDS, KERNEL_BACKENDS, AttentionFeature, Capabilities

WINDOWS, SOFTCAP, SINKS = AttentionFeature.WINDOWS, AttentionFeature.SOFTCAP, AttentionFeature.SINKS
DOCS = Path(__file__).parents[2] / "docs" / "backends.md"


def need(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> AttentionNeed:
    fields: dict[str, Any] = {"graph_capture": device == "cuda"} | changes
    return AttentionNeed(device, dtype, **fields)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that serves; a test that interprets says so."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def importable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is first to import a kernel decides for all tests whether it is interpreted."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize(
    ("asked", "name", "why"),
    [
        (need(), "triton", "the first choice on cuda"),
        (need(page_size=1, features=frozenset(AttentionFeature)), "triton", "the first choice on cuda"),
        (need("cpu", torch.float32, head_dim=9), "reference", "the first choice on cpu"),
        (
            need(graph_capture=False, head_dim=192, value_head_dim=128), "reference",
            "triton cannot attend with the target's heads of 192 and values of 128; "
            "flashinfer-cascade cannot attend with the target's heads of 192 and values of 128",
        ),
    ],
)  # fmt: skip
def test_auto_takes_the_first_that_fits_and_says_why(
    asked: AttentionNeed, name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a fallback nobody hears of."""
    caplog.set_level(logging.INFO, logger="eyas.kernels")
    assert choose_attention("auto", asked).name == name
    assert caplog.messages == [f"attention_backend: auto takes {name} for the target: {why}"]


def test_auto_passes_to_flashinfer_where_triton_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an order that ends with the slowest."""
    narrow = Capabilities("triton", ("cuda",), (torch.float32,), graph_capture=True)
    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", narrow)  # type: ignore[arg-type]
    assert choose_attention("auto", need(graph_capture=False)).name == "flashinfer-cascade"
    assert choose_attention("auto", need(graph_capture=False, head_dim=80)).name == "reference"


@pytest.mark.parametrize("name", list(ATTENTION_BACKENDS))
def test_a_named_backend_is_taken_as_it_is(name: str) -> None:
    """Catches a name that is an alias for whatever is best."""
    assert choose_attention(name, need(graph_capture=False)) is ATTENTION_BACKENDS[name]


def test_kernels_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Triton on a CPU without its interpreter, and the slow set on a GPU."""
    assert choose_kernels("auto", KernelNeed("cuda", torch.bfloat16, graph_capture=True)).name == "triton"
    assert choose_kernels("auto", KernelNeed("cpu", torch.float32)).name == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernels("auto", KernelNeed("cpu", torch.float32)).name == "reference"
    assert choose_kernels("triton", KernelNeed("cpu", torch.float32)).name == "triton"
    assert choose_attention("triton", need("cpu", torch.float32)).name == "triton"


UNSUPPORTED_ATTENTION = [
    (
        "flash", need(),
        "attention_backend: flash is not known; use one of auto, reference, triton, flashinfer-cascade, flashinfer",
    ),
    (
        "triton", need("cpu", torch.float32),
        "attention_backend: triton runs on cpu only interpreted, with TRITON_INTERPRET=1 in the environment; use "
        "reference",
    ),
    (
        "flashinfer", need("cpu"),
        "attention_backend: flashinfer does not run on cpu; use reference",
    ),
    (
        "flashinfer-cascade", need("cpu", torch.float32),
        "attention_backend: flashinfer-cascade does not run on cpu; use reference",
    ),
    (
        "reference", need(),
        "attention_backend: reference cannot be captured in CUDA graphs; use triton, or reference with --eager",
    ),
    (
        "flashinfer", need(),
        "attention_backend: flashinfer cannot be captured in CUDA graphs; use triton, or flashinfer with --eager",
    ),
    (
        "flashinfer-cascade", need(page_size=1),
        "attention_backend: flashinfer-cascade cannot be captured in CUDA graphs; use triton, or flashinfer-cascade "
        "with --eager",
    ),
    (
        "flashinfer-cascade", need(dtype=torch.float32),
        "attention_backend: flashinfer-cascade does not compute in float32; use triton",
    ),
    (
        "flashinfer", need(dtype=torch.float32, graph_capture=False),
        "attention_backend: flashinfer does not compute in float32; use triton",
    ),
    (
        "triton", need(dtype=torch.float64, graph_capture=False),
        "attention_backend: triton does not compute in float64; use another device",
    ),
    (
        "flashinfer", need(head_dim=80, value_head_dim=80),
        "attention_backend: flashinfer cannot attend with the target's heads of 80, only of 64, 128, 256; use triton",
    ),
    (
        "flashinfer-cascade", need(head_dim=96, value_head_dim=96, graph_capture=False),
        "attention_backend: flashinfer-cascade cannot attend with the target's heads of 96, only of 64, 128, 256; use "
        "triton",
    ),
    (
        "flashinfer-cascade", need(head_dim=32, value_head_dim=32, side="draft head"),
        "attention_backend: flashinfer-cascade cannot attend with the draft head's heads of 32, only of 64, 128, 256; "
        "use triton",
    ),
    (
        "triton", need(head_dim=512, value_head_dim=512),
        "attention_backend: triton cannot attend with the target's heads of 512, only up to 256; use reference with "
        "--eager",
    ),
    (
        "triton", need(head_dim=192, value_head_dim=128),
        "attention_backend: triton cannot attend with the target's heads of 192 and values of 128; use reference with "
        "--eager",
    ),
    (
        "triton", need(head_dim=192, value_head_dim=128, graph_capture=False),
        "attention_backend: triton cannot attend with the target's heads of 192 and values of 128; use reference",
    ),
    (
        "flashinfer", need(head_dim=128, value_head_dim=64, side="draft head", graph_capture=False),
        "attention_backend: flashinfer cannot attend with the draft head's heads of 128 and values of 64; use "
        "reference",
    ),
    (
        "reference", need(head_dim=192, value_head_dim=128),
        "attention_backend: reference cannot be captured in CUDA graphs; use reference with --eager",
    ),
    (
        "flashinfer-cascade", need(features=frozenset({WINDOWS})),
        "attention_backend: flashinfer-cascade does not do the target's sliding windows; use triton",
    ),
    (
        "flashinfer-cascade", need(features=frozenset({WINDOWS, SOFTCAP}), side="draft head", graph_capture=False),
        "attention_backend: flashinfer-cascade does not do the draft head's sliding windows; use triton",
    ),
    (
        "auto", need(head_dim=512, value_head_dim=512),
        "cuda_graphs: triton cannot attend with the target's heads of 512, only up to 256, and no other "
        "attention_backend can be captured; use --eager (reference)",
    ),
    (
        "auto", need(head_dim=192, value_head_dim=128, side="draft head"),
        "cuda_graphs: triton cannot attend with the draft head's heads of 192 and values of 128, and no other "
        "attention_backend can be captured; use --eager (reference)",
    ),
    (
        "auto", need("cpu", torch.float64),
        "attention_backend: nothing fits: reference does not compute in float64",
    ),
    (
        "auto", need("xpu", graph_capture=False),
        "attention_backend: nothing fits: there is nothing for xpu",
    ),
]  # fmt: skip


def kernels(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> KernelNeed:
    return KernelNeed(device, dtype, graph_capture=device == "cuda", sizes=sizes)


UNSUPPORTED_KERNELS = [
    ("cuda", kernels(), "kernel_backend: cuda is not known; use one of auto, reference, triton"),
    (
        "triton", kernels("cpu"),
        "kernel_backend: triton runs on cpu only interpreted, with TRITON_INTERPRET=1 in the environment; use "
        "reference",
    ),
    (
        "reference", kernels(),
        "kernel_backend: reference cannot be captured in CUDA graphs; use triton, or reference with --eager",
    ),
    (
        "triton", kernels(width=40),
        "kernel_backend: triton takes at most 32 for width, not 40; use reference with --eager",
    ),
    (
        "triton", kernels(width=32, candidates=5152),
        "kernel_backend: triton takes at most 4096 for candidates, not 5152; use reference with --eager",
    ),
    (
        "triton", kernels(draft_depth=64),
        "kernel_backend: triton takes at most 63 for draft_depth, not 64; use reference with --eager",
    ),
    (
        "auto", kernels(hidden_size=18432),
        "cuda_graphs: triton takes at most 16384 for hidden_size, not 18432, and no other kernel_backend can be "
        "captured; use --eager (reference)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "message"), UNSUPPORTED_ATTENTION)
def test_what_attention_cannot_do_is_refused_in_one_line(name: str, asked: AttentionNeed, message: str) -> None:
    """Catches a refusal without its reason or its remedy, and a combination that slips through."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        choose_attention(name, asked)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "asked", "message"), UNSUPPORTED_KERNELS)
def test_what_kernels_cannot_do_is_refused_in_one_line(name: str, asked: KernelNeed, message: str) -> None:
    """As for attention."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        choose_kernels(name, asked)
    assert str(caught.value) == message


def test_the_remedy_works() -> None:
    """Catches advice that is refused in turn."""
    for name, asked, message in UNSUPPORTED_ATTENTION:
        if name not in ATTENTION_BACKENDS or "another device" in message:
            continue
        for way in message.rsplit("; use ", 1)[1].split(", or "):
            other, _, eager = way.partition(" with ")
            choose_attention(other, replace(asked, graph_capture=asked.graph_capture and not eager))


def geometry(device: str = DEVICE.type) -> AttentionGeometry:
    return AttentionGeometry(4, 2, 64, 64, 16, torch.bfloat16, torch.device(device))


@pytest.mark.usefixtures("importable_kernels")
@pytest.mark.parametrize("name", list(ATTENTION_BACKENDS))
def test_backends_are_made_and_read_the_mask_they_declare(name: str) -> None:
    """Catches a declared mask encoding that the implementation does not read."""
    flashinfer_double.install()
    declared = ATTENTION_BACKENDS[name]
    here = replace(declared, devices=(DEVICE.type,))
    assert create_attention(here, geometry()).mask_encoding is declared.mask_encoding


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ImportError from a worker, or a silent other backend."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    here = replace(ATTENTION_BACKENDS["flashinfer"], devices=(DEVICE.type,))
    with pytest.raises(ValueError, match=r"needs flashinfer, which cannot be imported \(.*\); install eyas\[gpu\]"):
        create_attention(here, geometry())


def test_a_geometry_beyond_the_declaration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches head dims that the library would read beyond their tiles, when a caller has not chosen before."""
    with pytest.raises(ValueError, match="flashinfer does not run on cpu; use reference"):
        create_attention(ATTENTION_BACKENDS["flashinfer"], geometry("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="triton would run interpreted, not on cuda; unset TRITON_INTERPRET"):
        create_attention(ATTENTION_BACKENDS["triton"], geometry("cuda"))


@pytest.mark.usefixtures("importable_kernels")
def test_declared_limits_are_those_of_the_launchers() -> None:
    """Catches a limit that moves in a kernel's file only."""

    def constant(module: str, name: str) -> int:
        value: int = getattr(import_module(f"eyas.kernels.{module}"), name)
        return value

    assert ATTENTION_BACKENDS["triton"].limits == {"head_dim": constant("triton_attention", "MAX_HEAD_DIM")}
    assert KERNEL_BACKENDS["triton"].limits == {
        "head_dim": constant("triton_rope", "MAX_HEAD_DIM"),
        "hidden_size": constant("triton_norm", "MAX_WIDTH"),
        "width": constant("triton_grow", "MAX_WIDTH"),
        "draft_depth": constant("triton_compact", "MAX_ROWS") - 1,  # the root moves too
        "candidates": constant("triton_select", "MAX_POOLED"),
    }


def _dtypes(backend: Capabilities) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes)


def _devices(backend: Capabilities) -> str:
    return ", ".join(f"{name} (interpreted)" if name in backend.interpreted_on else name for name in backend.devices)


def _head_dims(backend: Capabilities) -> str:
    limit = backend.limits.get("head_dim")
    dims = "any" if backend.head_dims is None else ", ".join(map(str, backend.head_dims))
    return f"{dims if limit is None else f'up to {limit}'}{'' if backend.value_head_dims else ', values alike'}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def attention_table() -> str:
    heading = ("attention_backend", "devices", "dtypes", "head dims", "pages", "mask read", "also does", "CUDA graphs")
    rows = [
        _row(
            backend.name, _devices(backend), _dtypes(backend), _head_dims(backend),
            "any" if backend.page_sizes is None else ", ".join(map(str, backend.page_sizes)),
            str(backend.mask_encoding), ", ".join(sorted(backend.features)), "yes" if backend.graph_capture else "no",
        )
        for backend in ATTENTION_BACKENDS.values()
    ]  # fmt: skip
    return "\n".join([_row(*heading), _row(*["---"] * len(heading)), *rows])


def kernel_table() -> str:
    heading = ("kernel_backend", "devices", "dtypes", "limits", "CUDA graphs")
    rows = [
        _row(
            backend.name, _devices(backend), _dtypes(backend),
            ", ".join(f"{name} {limit}" for name, limit in backend.limits.items()) or "none",
            "yes" if backend.graph_capture else "no",
        )
        for backend in KERNEL_BACKENDS.values()
    ]  # fmt: skip
    return "\n".join([_row(*heading), _row(*["---"] * len(heading)), *rows])


@pytest.mark.parametrize("table", [attention_table, kernel_table])
def test_the_documented_tables_are_the_declarations(table: Any) -> None:
    """Catches a page that promises what a backend no longer declares; the message is the table to paste."""
    assert table() in DOCS.read_text(), f"\n{table()}"
