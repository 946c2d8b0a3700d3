"""What a step of the check is told, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """Where a step runs.

    Args:
        dry_run: on a CPU with tiny shapes: every line that can run does, its figures mean nothing.
    """

    dry_run: bool

    @property
    def device(self) -> torch.device:
        """With its index, as tensors have it: launchers compare devices."""
        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry_run else torch.bfloat16


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that must not exceed its limit."""

    name: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


@dataclass(slots=True)
class Outcome:
    """What a step found.

    Args:
        rows: its table, one flat dictionary a line, all with the same keys.
        settings: what the figures were taken with.
        omitted: what it could not do here, and why.
        failures: what went wrong; an empty list is a pass.
        bars: figures that have a limit; none in a dry run.
    """

    rows: list[dict[str, object]] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
