"""Step: what machine this is, in the words the other figures need, and its two ceilings.

The ceilings are the bandwidth of a copy within device memory, bytes read plus bytes written, and the rate of a large
matrix product.
"""

from __future__ import annotations

import shutil
import subprocess

import report
import torch
from outcome import Context, Outcome
from timing import copy_bandwidth, device_ms


def run(context: Context) -> Outcome:
    copied, side = (1 << 24, 256) if context.dry_run else (1 << 32, 8192)
    bandwidth = copy_bandwidth(copied, context.device)
    product = torch.randn((side, side), device=context.device).to(context.dtype)
    out = torch.empty_like(product)
    product_ms = device_ms(lambda _: torch.mm(product, product, out=out), context.device)
    facts: dict[str, object] = report.machine() | report.versions()
    facts |= {
        "nvcc": _nvcc(),
        "copy_gb_per_s": bandwidth / 1e9,
        "matrix_tflop_per_s": 2 * side**3 / (product_ms / 1e3) / 1e12,
    }
    outcome = Outcome(rows=[{"what": name, "value": value} for name, value in facts.items()])
    outcome.settings = {"copied_bytes": copied, "matrix_side": side, "matrix_dtype": str(context.dtype)}
    for package, used_for in (("triton", "its kernels"), ("flashinfer-python", "its attention backends and kernels")):
        if facts[package] is None:
            outcome.omitted.append(f"{package} is not installed: {used_for} cannot be checked")
    if context.dry_run:
        outcome.omitted.append("dry run on the CPU: every figure below is of tiny shapes and says nothing of a GPU")
    return outcome


def _nvcc() -> str | None:
    if shutil.which("nvcc") is None:
        return None
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
