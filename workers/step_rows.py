"""The flat rows of one eager step of a target: what the model runs over, and which of them choose a token."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from eyas.workers.paged_attention import AttentionGroup


@dataclass(slots=True)
class StepRows:
    """Flat rows of a step under construction: decoding requests first, then prompt chunks."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[Tensor] = field(default_factory=list)
    groups: list[AttentionGroup] = field(default_factory=list)

    def add(self, token_ids: list[int], positions: list[int], slots: Tensor) -> int:
        """Append rows and return the first one's index."""
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.positions += positions
        self.slots.append(slots)
        return first


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows to project to the vocabulary: flat index, owning request, position the chosen token will take."""

    index: list[int]
    owners: list[int]
    positions: list[int]
