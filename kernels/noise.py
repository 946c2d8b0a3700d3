"""Counter-based Gumbel noise keyed by (seed, position, token id): the shared randomness of target and drafter.

Every draw is a pure function of its key, so it does not matter which device or process asks, in which order, or for
which subset of the vocabulary. That makes sampled text independent of speculation (Gumbel coupling: Daliri, Musco,
Suresh, arXiv:2408.07978).

A key is hashed by two rounds of a 32-bit multiply-xorshift finaliser (constants of H. Wellons' "lowbias32") to a
32-bit word r, then g = -log(-log((r + 0.5) / 2**32)). The logarithms are taken in float64 and rounded once to float32,
so vectorised, scalar and GPU implementations of `log` agree on the result.

Letters: T rows, K keys, V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_KEYS_PER_BLOCK = 2


def _mix_int(x: int) -> int:
    x &= _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _mix(x: Tensor) -> Tensor:
    """`_mix_int` on int64 tensors holding 32-bit words; int64 products wrap but keep the low word exact."""
    x = (x ^ (x >> 16)).mul_(0x7FEB352D).bitwise_and_(_WORD)
    x = x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_WORD)
    return x.bitwise_xor_(x >> 16)


def stream_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words that key all tokens' draws at one position of one request's text."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first = _mix_int(_mix_int(low ^ 0x9E3779B9) + position)
    # Hashed apart from `first`: two seeds whose first words meet at some position must not share their streams there.
    second = _mix_int(_mix_int(high ^ 0x85EBCA6B) ^ _mix_int(_mix_int(low ^ 0xC2B2AE35) + position))
    return first, second


def stream_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """`stream_key` of each row, int64 `[T, 2]`, without a look at the values from the host.

    Args:
        seeds: int64 `[T]`; negative ones stand for the 64-bit words that they are.
        positions: int64 `[T]`.
    """
    low, high = seeds & _WORD, (seeds >> 32) & _WORD
    first = _mix(_mix(low ^ 0x9E3779B9).add_(positions).bitwise_and_(_WORD))
    second = _mix(_mix(low ^ 0xC2B2AE35).add_(positions).bitwise_and_(_WORD))
    return torch.stack([first, _mix(second.bitwise_xor_(_mix(high ^ 0x85EBCA6B)))], dim=1)


def gumbel_noise(keys: list[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """`keyed_noise` under `stream_key` results."""
    return keyed_noise(torch.tensor(keys, dtype=torch.int64, device=token_ids.device).reshape(-1, 2), token_ids)


def keyed_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel draws under each stream key, float32 `[K, V]`.

    Args:
        keys: from `stream_keys`, int64 `[K, 2]`.
        token_ids: the ids to draw for, `[V]`, or each key's own, `[K, V]`.
    """
    noise = torch.empty(keys.shape[0], token_ids.shape[-1], dtype=torch.float32, device=token_ids.device)
    ids = token_ids.expand(keys.shape[0], -1)
    # In blocks that stay in cache: the 64-bit intermediates of a whole batch would not.
    blocks = (x.split(_KEYS_PER_BLOCK) for x in (noise, keys, ids))
    for out, block, block_ids in zip(*blocks, strict=True):
        bits = _mix(_mix(block_ids ^ block[:, :1]) ^ block[:, 1:])
        uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
        out.copy_(uniform.log_().neg_().log_().neg_())
    return noise
