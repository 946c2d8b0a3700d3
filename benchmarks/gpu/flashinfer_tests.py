"""Step: the parity matrix of what FlashInfer computes, with the library's own kernels on the device.

The library compiles a kernel when it is first called for; that takes most of the time. In a dry run a double of the
library shows what it is handed, one regime of each form.
"""

from __future__ import annotations

import importlib.util

from outcome import Context, Outcome
from pytest_runs import MATRIX, one_regime_each, run_tests

SELECTION = "flashinfer"


def run(context: Context) -> Outcome:
    outcome = Outcome()
    if context.dry_run:
        run_tests("FlashInfer, one regime each, a double of the library", one_regime_each(SELECTION), outcome)
        outcome.omitted.append("the library's own kernels: there is no device")
    elif importlib.util.find_spec("flashinfer") is None:
        outcome.omitted.append("FlashInfer is not installed; fetch_wheels.sh fetches it on a machine with network")
    else:
        run_tests("FlashInfer", [MATRIX, "-k", SELECTION], outcome, parallel=True)
    return outcome
