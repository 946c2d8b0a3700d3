"""The steps of the check in their order, and how long each may take."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from outcome import Context, Outcome

# All of it must fit in eight minutes of a GPU.
TOTAL_S = 480.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step; the module of its name in this folder has `run(context)`."""

    name: str
    title: str
    limit_s: float

    def run(self, context: Context) -> Outcome:
        outcome: Outcome = importlib.import_module(self.name).run(context)
        return outcome


# Their sum is more than the whole may take: hardly any step needs its limit, and those that matter most come first.
STEPS = (
    Step("environment", "machine and versions", 30.0),
    Step("device_tests", "parity matrix on the device, and the tests that need one", 150.0),
    Step("graph_equality", "CUDA graphs against eager steps", 60.0),
    Step("exchange_timing", "features from process to process", 40.0),
    Step("verify_timing", "verify step against the bandwidth floor", 130.0),
    Step("draft_timing", "draft loop, eager against graph", 45.0),
    Step("overhead", "time of a step outside kernels", 45.0),
    Step("attention_timing", "attention backends against each other", 90.0),
    Step("operator_timing", "elementwise work and sampling by each backend", 60.0),
    Step("flashinfer_tests", "parity of FlashInfer on the device", 170.0),
    Step("flashinfer_timing", "FlashInfer's attention over the same points", 45.0),
    Step("flashinfer_operators", "FlashInfer's elementwise work and nucleus", 30.0),
)
