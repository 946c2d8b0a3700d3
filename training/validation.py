"""How often a head agrees with its target on texts it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.training.dataset import Batch
from eyas.training.initialisation import TargetOutput
from eyas.training.method import Head, TrainingMethod

_RECALL_RANKS = 4
_BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Validation:
    """Agreement with the target's own favourite over its whole vocabulary, on texts the head was not trained on.

    Args:
        recall: `[K][4]`: per level, the share of rows whose favourite is among the head's first 1, 2, 3, 4 candidates.
        chain_length: mean tokens per verify step of a K-token chain on these texts, bonus token included.
    """

    recall: list[list[float]]
    chain_length: float

    @property
    def accuracy(self) -> list[float]:
        """Per level, how often the head's first candidate is the favourite."""
        return [ranks[0] for ranks in self.recall]


@torch.no_grad()
def validate(
    method: TrainingMethod[Head], head: Head, output: TargetOutput, batches: list[Batch], num_levels: int
) -> Validation:
    """Measure a head in the dtype its weights have; `output`, in the same, spans the target's whole vocabulary."""
    hits = torch.zeros(num_levels, _RECALL_RANKS)
    totals = torch.zeros(num_levels)
    num_accepted, num_chains = 0, 0
    for batch in batches:
        recorded, hidden = batch.features.to(output.weight.dtype), output.norm.shape[0]
        compared = batch.rows(0) + 1
        normed = output.normed(recorded[compared, -hidden:])
        favourites = _top_columns(normed, output.weight, 1).squeeze(1)
        emitted = batch.next_ids[compared]
        emitted = torch.where(emitted < 0, favourites, emitted)
        is_open = torch.ones(compared.shape[0], dtype=torch.bool)
        states_by_level = method.level_states(head, method.inputs(recorded, output), batch, num_levels)
        for level, states in enumerate(states_by_level):
            rows = batch.later_rows(level)
            ranked = _best(method, head, states, level)
            hits[level] += (ranked == favourites[rows, None]).float().cumsum(dim=1).sum(dim=0)
            totals[level] += rows.shape[0]
            if level:
                kept = is_open.split(batch.num_bases(level - 1))
                is_open = torch.cat([x[:n] for x, n in zip(kept, batch.num_bases(level), strict=True)])
            is_open = is_open & (ranked[:, 0] == emitted[rows])
            num_accepted += int(is_open.sum())
        num_chains += compared.shape[0]
    return Validation((hits / totals.clamp(min=1)[:, None]).tolist(), 1 + num_accepted / max(1, num_chains))


def _best(method: TrainingMethod[Head], head: Head, states: Tensor, level: int) -> Tensor:
    """First candidates after each state, int64 `[R, 4]`."""
    columns = _top_columns(method.projected(head, states, level), method.projection(head, level), _RECALL_RANKS)
    return head.candidate_ids[columns]


def _top_columns(states: Tensor, weight: Tensor, count: int) -> Tensor:
    """Best `count` rows of an output projection after each state `[R, H]`, without all the scores at once."""
    return torch.cat([F.linear(rows, weight).topk(count, dim=-1).indices for rows in states.split(_BLOCK_ROWS)])
