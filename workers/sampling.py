"""Sampling parameters of one request, as they cross from the router to the workers."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """How a request's tokens are drawn.

    Args:
        temperature: 0 is greedy.
        top_p: nucleus mass kept after temperature; 1 keeps everything.
        seed: keys the request's noise; together with the position it fixes every draw.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")
