"""Who ranks a head's scores in each call of a draft: from sampling that the host knows, or from the device's alone.

Letters: B requests, T rows of a call, C scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.kernels.sample import single_temperatures
from eyas.models.head import Candidates, Ranker
from eyas.workers.sampler import NoiseRanker, RowSampling, best_candidates
from eyas.workers.sampling import SamplingParams

Perturb = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""As `kernels.sample.perturb`."""


class Rankers(Protocol):
    """Makes the ranker of one call of a head."""

    def __call__(self, levels: range, rows_each: int, width: int) -> Ranker:
        """For `rows_each` states of each request at each of `levels`, keeping the best `width` of each."""
        ...

    def is_sampled(self, device: torch.device) -> Tensor:
        """Which requests are ranked under noise, bool `[B]`."""
        ...


@dataclass(frozen=True, slots=True)
class HostRankers:
    """`Rankers` over sampling that the host knows.

    Args:
        params, covered: of each request, `[B]`.
    """

    params: list[SamplingParams]
    covered: list[int]

    def __call__(self, levels: range, rows_each: int, width: int) -> Ranker:
        rows = RowSampling(
            params=[each for each in self.params for _ in range(rows_each * len(levels))],
            positions=[covered + level for covered in self.covered for _ in range(rows_each) for level in levels],
        )
        return NoiseRanker(rows, width)

    def is_sampled(self, device: torch.device) -> Tensor:
        return torch.tensor([each.temperature > 0 for each in self.params], dtype=torch.bool, device=device)


@dataclass(frozen=True, slots=True)
class DeviceRankers:
    """`Rankers` over sampling that only the device knows.

    Args:
        temperatures: float64 `[B]`.
        seeds, covered: int64 `[B]`.
    """

    temperatures: Tensor
    seeds: Tensor
    covered: Tensor
    perturb: Perturb

    def __call__(self, levels: range, rows_each: int, width: int) -> Ranker:
        repeats = rows_each * len(levels)
        positions = self.covered[:, None, None] + torch.arange(levels.start, levels.stop, device=self.covered.device)
        return DeviceRanker(
            temperatures=single_temperatures(self.temperatures).repeat_interleave(repeats),
            seeds=self.seeds.repeat_interleave(repeats),
            positions=positions.expand(-1, rows_each, -1).flatten().contiguous(),
            perturb=self.perturb,
            width=width,
        )

    def is_sampled(self, device: torch.device) -> Tensor:
        return self.temperatures > 0


@dataclass(frozen=True, slots=True)
class DeviceRanker:
    """`Ranker` under the target's noise, see `NoiseRanker`; it ranks the whole distribution, not a nucleus of it.

    Args:
        temperatures, seeds, positions: of each row, `[T]`.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    perturb: Perturb
    width: int

    def rank(self, logits: Tensor, token_ids: Tensor) -> Candidates:
        scores = self.perturb(logits, self.temperatures, self.seeds, self.positions, token_ids)
        return best_candidates(scores, token_ids, self.width)

    def shortlist(self, logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
        scores = self.perturb(logits, self.temperatures, self.seeds, self.positions, token_ids)
        return scores.topk(count, dim=-1).indices
