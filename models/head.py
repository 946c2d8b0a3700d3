"""The protocol of draft heads: all that drafting, tree growth, budgets and KV moves know of one.

A head reads states of the target ("features") at committed positions and scores the tokens that may follow. The pair
of position i is (target features at i, token i + 1); its state foretells token i + 2. A drafted token is one more pair,
whose feature is the state of its parent.

Letters: T rows, S width of a head's state (its own business), F features of a position, C scored tokens, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.attention import Attention


@dataclass(frozen=True, slots=True)
class HeadCache:
    """Keys and values a head keeps at every position, in the drafter's own pool."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Candidates:
    """Best continuations of each row, best first.

    Args:
        tokens: target ids, int64 `[T, W]`.
        log_probs: score of each, float32 `[T, W]`.
    """

    tokens: Tensor
    log_probs: Tensor


class Ranker(Protocol):
    """Ranks a head's scores as the requests' sampling asks: plain at temperature 0, else under their noise."""

    def rank(self, logits: Tensor, token_ids: Tensor) -> Candidates:
        """The best of `logits [T, C]`, whose column j scores `token_ids[j]`, or `token_ids[t, j]` if `[T, C]`."""

    def shortlist(self, logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
        """Columns of the best `count` of each row, int64 `[T, count]`, for a head that scores in two stages."""


class DraftHead(nn.Module, ABC):
    """A draft head.

    Args:
        capture: what it reads, as residual-stream indices of the target: k is the state after k layers, before the
            final norm; `DecoderConfig.final_index` is the state after it.
        cache: None for a head without attention.
        max_depth: levels it can draft; None if it can go on for ever.
        state_size: width of its states.
        is_path_dependent: False if a level's candidates are the same whatever the level above chose.
        candidate_ids: target ids it can propose, int64 `[Vd]`.
        dtype, device: of its weights and of the features it takes.
        acceptance_prior: what its scores are turned into before trees grow by them; None for a head without one.
    """

    capture: tuple[int, ...]
    cache: HeadCache | None
    max_depth: int | None = None
    state_size: int
    is_path_dependent: bool = True
    candidate_ids: Tensor
    dtype: torch.dtype
    device: torch.device
    acceptance_prior: AcceptancePrior | None = None

    @property
    def max_candidates(self) -> int:
        """Candidates it can propose after one state."""
        return self.candidate_ids.numel()

    @abstractmethod
    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """States `[T, S]` of committed pairs.

        Args:
            features: true target features, `[T, F]`.
            token_ids: the token after each, `[T]`.
            positions: of the features, `[T]`.
        """

    @abstractmethod
    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """States `[T, S]` of drafted tokens `[T]` from the states `[T, S]` of their parents: one level of a tree."""

    @abstractmethod
    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        """Candidates after each state `[T, S]`, at each of `levels` below the root (1 is the root's children).

        Returns:
            `[T * len(levels), W]`, the levels of a row side by side. A path-dependent head is asked for one level at
            a time, that of the states' children; another for all at once.
        """
