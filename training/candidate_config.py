"""How the candidate projection of a head is trained."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.training.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateConfig(RunConfig):
    """How to train; further arguments are those of `RunConfig`, the levels being steps of the training-time test.

    Args:
        head: path of the head, which a resumed run must share.
        rank: of the factors.
        num_candidates: tokens they retrieve for exact scoring.
    """

    head: str
    rank: int
    num_candidates: int
    tokens_per_batch: int = 3000
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)  # super() does not find its class in one with slots
        self.require_whole("rank", "num_candidates")
