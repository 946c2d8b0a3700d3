"""Counting what verify steps accepted, by depth and by rank among siblings.

At each depth of an accepted path the children of the node reached are *proposed*: one of them is accepted, or none.
What lies under a rejected node is not judged, and neither is what lies past the end of a text. Where a text ends within
the accepted tokens of a step, that step keeps no token of the target's own; so
`accepted tokens = kept tokens - (steps - cut steps)`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from eyas.deployments.calibration_curve import CalibrationCurve
from eyas.deployments.offline import OfflineOutput
from eyas.deployments.step_observer import ObservedStep


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts over any number of steps.

    Args:
        num_tokens: kept by their texts; the first one of a text comes from its prompt's pass and is in no step.
        num_cut: steps in whose accepted tokens a text ended.
        proposed, accepted: by depth (1 is the root's children): steps that proposed a token there, and accepted one.
        rank_proposed, rank_accepted: the same by depth and by rank in the head's order (1 is its first).
        raw, used: the edges proposed, by the head's probability and by the one growth took for it.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    proposed: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rank_proposed: Counter[tuple[int, int]] = field(default_factory=Counter)
    rank_accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    raw: CalibrationCurve = field(default_factory=CalibrationCurve)
    used: CalibrationCurve = field(default_factory=CalibrationCurve)

    @property
    def acceptance_length(self) -> float:
        """As `offline.acceptance_length` of the same texts."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, all depths together."""
        return self.accepted.total()

    def add_text(self, steps: list[ObservedStep], output: OfflineOutput) -> None:
        """Count the steps of one answer.

        Raises:
            ValueError: if they are not those the answer was made of.
        """
        left = output.num_step_tokens
        if len(steps) != output.num_steps:
            raise ValueError(f"{len(steps)} steps were observed of an answer made in {output.num_steps}")
        for step in steps:
            num_kept = min(len(step.run), left)
            left -= num_kept
            self.add(step, num_kept)
        if left:
            raise ValueError(f"the steps observed lack {left} tokens of their answer")

    def add(self, step: ObservedStep, num_kept: int) -> None:
        """Count one step of whose tokens the text keeps the first `num_kept`, which is at least 1."""
        self.num_steps += 1
        self.num_tokens += num_kept
        self.num_cut += num_kept < len(step.run)
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(step.parents):
            children.setdefault(parent, []).append(child)
        node = 0
        for depth, token in enumerate(step.run[:num_kept], start=1):
            proposed = children.get(node, [])
            if not proposed:
                return
            self.proposed[depth] += 1
            found = None
            for child in proposed:
                edge = step.edges[child - 1]
                is_accepted = step.tokens[child] == token
                self.rank_proposed[depth, edge.rank] += 1
                self.rank_accepted[depth, edge.rank] += is_accepted
                self.raw.add(edge.raw, is_accepted)
                self.used.add(edge.used, is_accepted)
                if is_accepted:
                    found = child
            if found is None:
                return
            self.accepted[depth] += 1
            node = found
