"""Growing the draft trees of a batch from tensors alone: rank, grow, step, level after level.

The same code drafts eagerly and inside a recorded graph: it reads no device value on the host.

Letters: B requests, W candidates per parent, E nodes of a level to be extended, S width of a head's state, P pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.kernels.attention_backend import AttentionBackend
from eyas.kernels.fused import REFERENCE, FusedOperations
from eyas.kernels.grow import Frontier
from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.head import DraftHead
from eyas.workers.kv_pool import KVPool
from eyas.workers.level_attention import LevelAttention
from eyas.workers.rankers import Rankers


class Growth(Protocol):
    """What drafting asks of a `TreeGrowth` or `StaticGrowth`."""

    def num_candidates(self, level: int) -> int: ...

    def start(self, tokens: Tensor, log_probs: Tensor) -> Frontier: ...

    def expand(self, tokens: Tensor, log_probs: Tensor) -> Frontier: ...


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Where the trees of a batch grow from.

    Args:
        states: the head's state after the newest pair of each request, `[B, S]`.
        covered: positions that have draft KV, int64 `[B]`.
        page_table: int32 `[B, P]`.
        max_covered: bound of `covered`, known to the host.
    """

    states: Tensor
    covered: Tensor
    page_table: Tensor
    max_covered: int


@dataclass(frozen=True, slots=True)
class TreeDrafting:
    """A head with what it drafts on.

    Args:
        pool, backend: None for a head that keeps no cache.
        prior: turns the head's scores into those that trees grow by; None takes them as they are.
    """

    head: DraftHead
    pool: KVPool | None
    backend: AttentionBackend | None
    fused: FusedOperations = REFERENCE
    prior: AcceptancePrior | None = None

    def grow(self, growth: Growth, inputs: DraftInputs, depth: int, rankers: Rankers) -> None:
        """Fill `growth` with `depth` levels; the caller finishes it with its budgets."""
        if self.head.is_path_dependent:
            self._grow_paths(growth, inputs, depth, rankers)
        else:
            self._grow_product(growth, inputs, depth, rankers)

    def _grow_paths(self, growth: Growth, inputs: DraftInputs, depth: int, rankers: Rankers) -> None:
        """Level by level: the head reads what the level above chose."""
        batch = inputs.states.shape[0]
        states = inputs.states[:, None]  # [B, 1, S]
        levels = LevelAttention(
            self.head, self.pool, self.backend, inputs.page_table, inputs.covered, inputs.max_covered, self.fused
        )
        score = self._scorer(rankers, inputs.states.device)
        for level in range(1, depth + 1):
            width, one = growth.num_candidates(level), range(level, level + 1)
            ranked = self.head.candidates(states.flatten(0, 1), one, rankers(one, states.shape[1], width))
            tokens, log_probs = (x.view(batch, -1, width) for x in (ranked.tokens, ranked.log_probs))
            log_probs = score(log_probs, level)
            frontier = growth.start(tokens[:, 0], log_probs[:, 0]) if level == 1 else growth.expand(tokens, log_probs)
            if level < depth:
                ranks = frontier.parent_ranks
                parent_states = states.gather(1, ranks[:, :, None].expand(-1, -1, states.shape[2]))
                states = levels.step(parent_states, frontier.tokens, ranks)  # [B, E, S]

    def _grow_product(self, growth: Growth, inputs: DraftInputs, depth: int, rankers: Rankers) -> None:
        """All levels from one call: a level's candidates are the same under every node of the level above."""
        widths = [growth.num_candidates(level) for level in range(1, depth + 1)]
        levels = range(1, depth + 1)
        ranked = self.head.candidates(inputs.states, levels, rankers(levels, 1, max(widths)))
        tokens, log_probs = (x.view(inputs.states.shape[0], depth, -1) for x in (ranked.tokens, ranked.log_probs))
        score = self._scorer(rankers, inputs.states.device)
        scores = [score(log_probs[:, level, None, :width], level + 1) for level, width in enumerate(widths)]
        frontier = growth.start(tokens[:, 0, : widths[0]], scores[0][:, 0])
        for level in range(1, depth):
            shape = (-1, frontier.tokens.shape[1], widths[level])
            frontier = growth.expand(tokens[:, level, None, : widths[level]].expand(shape), scores[level].expand(shape))

    def _scorer(self, rankers: Rankers, device: torch.device) -> Callable[[Tensor, int], Tensor]:
        """From the head's log-probabilities `[B, E, W]` of a level to what its edges count in growth."""
        prior = self.prior
        if prior is None or prior.is_identity:
            return lambda log_probs, level: log_probs
        is_sampled = rankers.is_sampled(device)
        return lambda log_probs, level: prior.apply(log_probs, level, is_sampled)


def stacked_states(states: list[Tensor | None]) -> Tensor:
    """States of a batch, `[B, S]`.

    Raises:
        RuntimeError: for a request whose prompt is not through.
    """
    known = [state for state in states if state is not None]
    if len(known) < len(states):
        raise RuntimeError("a request cannot draft before its prompt is through")
    return torch.stack(known)
