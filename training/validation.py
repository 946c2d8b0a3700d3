"""How often a head agrees with its target on texts it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.training.batch import Batch
from eyas.training.initialisation import TargetOutput
from eyas.training.method import Head, TrainingMethod

WIDTH = 4
_BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Validation:
    """Agreement with the target's own favourite over its whole vocabulary, on answers the head was not trained on.

    Args:
        recall: `[K][4]`: per level, the share of rows whose favourite is among the head's first 1, 2, 3, 4 candidates.
        chain_length: mean tokens per verify step of a K-token chain on these texts, bonus token included: as long as
            the head's first candidate is the token of the text.
        tree_length: the same of a tree that keeps the first 4 candidates of every node: as long as the token of the
            text is among them. A drafter's node budget only allows fewer, so it is an upper bound.
    """

    recall: list[list[float]]
    chain_length: float
    tree_length: float

    @property
    def accuracy(self) -> list[float]:
        """Per level, how often the head's first candidate is the favourite."""
        return [ranks[0] for ranks in self.recall]


@torch.no_grad()
def validate(
    method: TrainingMethod[Head], head: Head, output: TargetOutput, batches: Iterable[Batch], num_levels: int
) -> Validation:
    """Measure a head in the dtype its weights have; `output`, in the same, spans the target's whole vocabulary.

    Args:
        num_levels: K; fewer where the head cannot draft as many.
    """
    num_levels = num_levels if head.max_depth is None else min(num_levels, head.max_depth)
    device = output.weight.device
    hits, totals = torch.zeros(num_levels, WIDTH, device=device), torch.zeros(num_levels, device=device)
    accepted, num_chains = torch.zeros(WIDTH, device=device), torch.zeros((), device=device)
    for batch in batches:
        recorded, hidden = batch.features.to(output.weight.dtype), output.norm.shape[0]
        compared = batch.rows(0) + 1
        is_foretold = batch.precedes_answer[compared]
        normed = output.normed(recorded[compared, -hidden:])
        favourites = _top_columns(normed, output.weight, 1).squeeze(1)
        emitted = batch.next_ids[compared]
        emitted = torch.where(emitted < 0, favourites, emitted)
        is_open = is_foretold[:, None].expand(-1, WIDTH)  # column w: a drafter that keeps w + 1 candidates
        states_by_level = method.level_states(head, method.inputs(recorded, output), batch, num_levels)
        for level, states in enumerate(states_by_level):
            rows = batch.later_rows(level)
            ranked, counts = _best(method, head, states, level), is_foretold[rows]
            hits[level] += _among_first(ranked, favourites[rows])[counts].sum(dim=0)
            totals[level] += counts.sum()
            if level:
                kept = is_open.split(batch.num_bases(level - 1))
                is_open = torch.cat([x[:n] for x, n in zip(kept, batch.num_bases(level), strict=True)])
            is_open = is_open & counts[:, None] & _among_first(ranked, emitted[rows])
            accepted += is_open.sum(dim=0)
        num_chains += is_foretold.sum()
    lengths = (1 + accepted / num_chains.clamp(min=1)).tolist()
    return Validation((hits / totals.clamp(min=1)[:, None]).tolist(), lengths[0], lengths[-1])


def _among_first(ranked: Tensor, tokens: Tensor) -> Tensor:
    """Whether each token `[R]` is among the first 1 … W of its row's candidates `[R, W]`, bool `[R, W]`."""
    return (ranked == tokens[:, None]).cumsum(dim=1) > 0


def _best(method: TrainingMethod[Head], head: Head, states: Tensor, level: int) -> Tensor:
    """First candidates after each state, int64 `[R, W]`."""
    columns = _top_columns(method.projected(head, states, level), method.projection(head, level), WIDTH)
    return head.candidate_ids[columns]


def _top_columns(states: Tensor, weight: Tensor, count: int) -> Tensor:
    """Best `count` rows of an output projection after each state `[R, H]`, without all the scores at once."""
    return torch.cat([F.linear(rows, weight).topk(count, dim=-1).indices for rows in states.split(_BLOCK_ROWS)])
