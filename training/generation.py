"""What the target is asked for when it writes a corpus, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One text the target shall continue; the stop token is part of the result."""

    prompt_ids: list[int]
    temperature: float
    top_p: float
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """`request_id` finds the text's features in the recorder."""

    request_id: int
    token_ids: list[int]


Generate = Callable[[list[GenerationJob]], list[GeneratedText]]


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """How much to write, and how.

    Args:
        num_tokens: answer tokens to write in all.
        greedy_share: part of the answers written at temperature 0; the others at `answer_temperature`.
        opener_share: part of the invented turns that begin with given words; the target begins the others.
    """

    num_tokens: int = 1_000_000
    conversations_per_shard: int = 192
    max_user_tokens: int = 64
    max_answer_tokens: int = 192
    user_temperature: float = 1.0
    user_top_p: float = 0.95
    greedy_share: float = 0.6
    answer_temperature: float = 0.7
    opener_share: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("greedy_share", "opener_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: must be between 0 and 1, got {getattr(self, name)}")
        if not self.answer_temperature > 0.0:
            raise ValueError(
                f"answer_temperature: must be above 0, got {self.answer_temperature}; a greedy_share of 1 makes all "
                "answers greedy"
            )
        if min(self.num_tokens, self.conversations_per_shard, self.max_user_tokens, self.max_answer_tokens) < 1:
            raise ValueError("num_tokens, conversations_per_shard, max_user_tokens and max_answer_tokens must be >= 1")

    def first_seed(self, round_index: int) -> int:
        """Seed of a round's first text; the others follow."""
        return self.seed * _SEED_STRIDE + round_index * self.conversations_per_shard
