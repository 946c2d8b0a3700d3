"""Step: FlashInfer's norm, gate and nucleus over the sizes of `operator_timing`."""

from __future__ import annotations

import operator_timing
from flashinfer_timing import is_absent
from outcome import Context, Outcome


def run(context: Context) -> Outcome:
    if is_absent(context):
        return Outcome(omitted=["FlashInfer's operations: the library is not installed, or there is no device"])
    return operator_timing.measure(context, ["flashinfer"])
