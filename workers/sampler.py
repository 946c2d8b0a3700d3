"""Choosing the target's token at every tree node, and ranking the drafter's candidates, with the same noise.

At temperature T the token is `argmax(processed_logits / T + gumbel(seed, position, token))`: an exact draw from
softmax(processed_logits / T) that depends on nothing but the text so far and the request's key. Noise is keyed by the
position the *new* token will take, so siblings share it and it is computed once per position.

Letters: T rows, V vocabulary, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.kernels.noise import gumbel_noise, stream_key
from eyas.kernels.sample import MIN_TEMPERATURE
from eyas.models.head import Candidates
from eyas.workers.sampling import SamplingParams

_NUCLEUS_GUESS = 1024


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Which request's parameters each row of a logits matrix uses, and the position its token will take."""

    params: list[SamplingParams]
    positions: list[int]


def perturbed_logits(logits: Tensor, rows: RowSampling, token_ids: Tensor) -> Tensor:
    """Float32 `logits / temperature + noise`, top-p applied; greedy rows are returned unperturbed.

    Args:
        logits: `[T, V]`; column j scores `token_ids[j]`, or `token_ids[t, j]` if they are `[T, V]`.
    """
    logits = logits.float()
    sampled = [row for row, params in enumerate(rows.params) if params.temperature > 0]
    if not sampled:
        return logits
    index = torch.tensor(sampled, device=logits.device)
    keys = [stream_key(rows.params[row].seed, rows.positions[row]) for row in sampled]
    if token_ids.dim() == 1:
        key_to_row = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        noise = gumbel_noise(list(key_to_row), token_ids)[[key_to_row[key] for key in keys]]
    else:
        noise = gumbel_noise(keys, token_ids[index])
    divisors = [max(rows.params[row].temperature, MIN_TEMPERATURE) for row in sampled]
    temperatures = torch.tensor(divisors, device=logits.device)
    scaled = logits[index] / temperatures[:, None]
    # Rows without a nucleus are left out: rounding could cut off tokens that they have when they are alone in a step.
    # In float32, as recorded steps ask it.
    top_ps = np.array([rows.params[row].top_p for row in sampled], dtype=np.float32).tolist()
    narrowed = [(place, top_p) for place, top_p in enumerate(top_ps) if top_p < 1.0]
    if narrowed:
        places, limits = (torch.tensor(column, device=logits.device) for column in zip(*narrowed, strict=True))
        scaled[places] = nucleus(scaled[places], limits)
    return logits.index_copy(0, index, scaled + noise)


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf every logit below each row's nucleus: the likeliest tokens whose probability reaches `top_p [T]`.

    Tokens tied with the nucleus' last one stay, so the result does not depend on how ties are ordered.
    """
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    # The nucleus is nearly always a small part of the vocabulary; summing all of it would dominate a step.
    for num_sorted in (min(_NUCLEUS_GUESS, logits.shape[1]), logits.shape[1]):
        ordered = _best_values(logits, num_sorted)
        mass = (ordered - log_total).exp().cumsum(dim=-1)
        if bool((mass[:, -1] >= top_p).all()):
            break
    last = (mass < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=num_sorted - 1)
    return logits.masked_fill(logits < ordered.gather(1, last), -torch.inf)


def _best_values(logits: Tensor, count: int) -> Tensor:
    """The `count` highest of each row, best first."""
    if logits.device.type != "cpu":
        return logits.topk(count, dim=-1).values
    # NumPy's vectorised sort of a whole row takes a third of torch's partial one, and a twentieth of its full one.
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, -1 : -count - 1 : -1].copy())


def choose_tokens(logits: Tensor, rows: RowSampling) -> Tensor:
    """The target's token after each row, int64 `[T]`, from full-vocabulary logits `[T, V]`."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return perturbed_logits(logits, rows, token_ids).max(dim=-1).indices


def best_candidates(scores: Tensor, token_ids: Tensor, width: int) -> Candidates:
    """The best `width` of perturbed logits `[T, C]`, whose columns score `token_ids`, `[C]` or `[T, C]`."""
    best, columns = scores.topk(min(width, scores.shape[1]), dim=-1)
    tokens = token_ids[columns] if token_ids.dim() == 1 else token_ids.gather(1, columns)
    return Candidates(tokens=tokens, log_probs=best - scores.logsumexp(dim=-1, keepdim=True))


@dataclass(frozen=True, slots=True)
class NoiseRanker:
    """`Ranker` under the noise the target will use (Gumbel top-k): scores are log-softmax of the *perturbed* logits."""

    rows: RowSampling
    width: int

    def rank(self, logits: Tensor, token_ids: Tensor) -> Candidates:
        """The normaliser runs over the columns given."""
        return best_candidates(perturbed_logits(logits, self.rows, token_ids), token_ids, self.width)

    def shortlist(self, logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
        return perturbed_logits(logits, self.rows, token_ids).topk(count, dim=-1).indices
