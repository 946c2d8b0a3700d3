"""Choosing tokens under the noise of `kernels.noise`, as tensor operations that never look at a value on the host.

The token of a row at temperature t is `argmax(logits / t + gumbel(seed, position, token))`; at t = 0 it is the argmax
of the logits. Ties go to the lowest id. Nothing here knows of requests: each row brings its own temperature, seed and
position, so a captured graph can be replayed with others.

Letters: T rows, C columns, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.noise import keyed_noise, stream_keys

MIN_TEMPERATURE = 1e-30  # greedy by far; below, logits would overflow and no longer be told apart


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row of logits.

    Args:
        tokens: int64 `[T]`; where `is_finite` is False some valid id or other.
        is_finite: False where a row's logits hold NaN or their largest is infinite, bool `[T]`.
    """

    tokens: Tensor
    is_finite: Tensor


def perturb(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Float32 `logits / temperature + noise`, `[T, C]`; rows of temperature 0 come back as they are, in float32.

    Args:
        logits: `[T, C]` in any floating dtype.
        temperatures: float32 `[T]`, not negative; those above 0 count as at least `MIN_TEMPERATURE`.
        seeds: of each row's request, int64 `[T]`.
        positions: that the new token will take, int64 `[T]`.
        token_ids: what the columns score, int64 `[C]`, or each row's own, `[T, C]`.
    """
    logits = logits.float()
    divisors = temperatures.clamp(min=MIN_TEMPERATURE)[:, None]
    noise = keyed_noise(stream_keys(seeds, positions), token_ids)
    return torch.where(temperatures[:, None] > 0, logits / divisors + noise, logits)


def single_temperatures(temperatures: Tensor) -> Tensor:
    """Float64 temperatures in float32, none above 0 lost: greedy rows break ties by id, others by their noise."""
    return torch.where(temperatures > 0, temperatures.clamp(min=MIN_TEMPERATURE), temperatures).float()


def sample_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> SampledTokens:
    """The token after each row of full-vocabulary logits `[T, V]`; the other arguments as for `perturb`."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    perturbed = perturb(logits, temperatures, seeds, positions, token_ids)
    return SampledTokens(
        tokens=perturbed.argmax(dim=-1),
        is_finite=logits.amax(dim=-1).isfinite(),  # NaN wins every comparison, so one reduction finds it as well
    )


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf every logit below its row's nucleus: the likeliest tokens whose probability reaches `top_p [T]`.

    Tokens tied with the nucleus' last one stay, so the result does not depend on how ties are ordered. Rows with a
    `top_p` of 1 keep all their tokens: rounding would take the rarest ones.

    Args:
        logits: divided by the temperature already, float32 `[T, V]`.
        top_p: float32 `[T]`, above 0.
    """
    # The whole vocabulary is sorted: to stop early is to ask the device how far it got.
    ordered = logits.sort(dim=-1, descending=True).values
    mass = (ordered - logits.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    last = (mass < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return logits.masked_fill((logits < ordered.gather(1, last)) & (top_p < 1.0)[:, None], -torch.inf)
