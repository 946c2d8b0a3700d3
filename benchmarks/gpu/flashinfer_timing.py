"""Step: FlashInfer's attention over the points of `attention_timing`, beside the reference.

After `flashinfer_tests`, which has compiled its kernels: that takes minutes and is no part of any figure.
"""

from __future__ import annotations

import importlib.util

import attention_timing
from outcome import Context, Outcome

BACKENDS = ["reference", "flashinfer-cascade", "flashinfer"]


def run(context: Context) -> Outcome:
    if is_absent(context):
        return Outcome(omitted=["FlashInfer's attention: the library is not installed, or there is no device"])
    return attention_timing.measure(context, BACKENDS)


def is_absent(context: Context) -> bool:
    """Whether FlashInfer cannot run here."""
    return context.dry_run or importlib.util.find_spec("flashinfer") is None
