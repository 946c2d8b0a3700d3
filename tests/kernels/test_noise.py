"""All samples here are fixed by their seeds, so a statistical test either always passes or always fails."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.kernels.noise import gumbel_noise, keyed_noise, stream_key, stream_keys

SEEDS = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
WORD = 2**32 - 1
VOCAB_SIZE = 151_936
TOKEN_IDS = torch.tensor([0, 5, 1_000, 65_536, 151_935])  # the tiny vocabulary, with ids far apart
LOGITS = torch.tensor([0.0, -0.5, 1.0, -2.0, 0.3])
CHI_SQUARE_LIMIT = 23.5  # four degrees of freedom, exceeded once in 10 000 fair samples
NUM_DRAWS = 20_000


def lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def inverse_lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * pow(0x846CA68B, -1, 2**32)) & WORD
    x = ((x ^ (x >> 15) ^ (x >> 30)) * pow(0x7FEB352D, -1, 2**32)) & WORD
    return x ^ (x >> 16)


def chi_square(noise: Tensor) -> float:
    """Distance of `argmax(LOGITS + noise [draws, 5])` from `softmax(LOGITS)`."""
    counts = (LOGITS + noise).argmax(dim=1).bincount(minlength=5).double()
    expected = LOGITS.double().softmax(-1) * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**20),
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40),
)
def test_noise_is_a_function_of_its_key(seed: int, position: int, token_ids: list[int]) -> None:
    """Catches noise that vector width, word size or the platform's logarithm could change: each bit is recomputed."""
    first, second = stream_key(seed, position)
    noise = gumbel_noise([(first, second)], torch.tensor(token_ids))
    assert noise.dtype == torch.float32
    words = [lowbias32(lowbias32(token ^ first) ^ second) for token in token_ids]
    expected = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words]
    assert noise.tolist() == [torch.tensor(expected, dtype=torch.float32).tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_subsets_and_orders_see_the_same_noise(seed: int) -> None:
    """Catches draws that depend on which other tokens or rows are asked for, as a reduced draft vocabulary does."""
    keys = [stream_key(seed, position) for position in (0, 1, 77, 131_071)]
    ids = torch.arange(VOCAB_SIZE)
    whole = gumbel_noise(keys, ids)
    assert bool(whole.isfinite().all())
    shuffled = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(keys, shuffled), whole[:, shuffled])
    for subset in (ids[1:], ids[3::7], ids[-5:], ids[:1], ids[:0], shuffled[:321].to(torch.int32)):
        assert torch.equal(gumbel_noise(keys, subset), whole[:, subset.long()])
    for row, key in enumerate(keys):
        assert torch.equal(gumbel_noise([key], ids), whole[row : row + 1])
    assert torch.equal(gumbel_noise(keys[::-1], ids), whole.flip(0))


@given(
    rows=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=20),
)
def test_keys_of_tensors_are_those_of_integers(rows: list[tuple[int, int]]) -> None:
    """Catches 64-bit products, shifts and signs that change a word once seeds and positions come as tensors."""
    rows += [(seed, position) for seed in (*SEEDS, -1, -(2**63)) for position in (0, 2**32 - 1)]
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    keys = stream_keys(seeds, positions)
    assert keys.dtype == torch.int64
    assert keys.tolist() == [list(stream_key(seed % 2**64, position)) for seed, position in rows]
    assert torch.equal(keyed_noise(keys, TOKEN_IDS), gumbel_noise([stream_key(*row) for row in rows], TOKEN_IDS))
    assert seeds.tolist() == [seed for seed, _ in rows]


def test_no_streams() -> None:
    """Catches an all-greedy batch, which asks for no noise at all."""
    assert gumbel_noise([], torch.arange(4)).shape == (0, 4)
    assert keyed_noise(stream_keys(torch.zeros(0).long(), torch.zeros(0).long()), torch.arange(4)).shape == (0, 4)


def test_seeds_and_positions_have_their_own_noise() -> None:
    """Catches seeds cut to 32 bits or below, and positions that repeat."""
    keys = [stream_key(seed, position) for seed in SEEDS for position in (0, 1, 2, 2**16, 2**17)]
    best = gumbel_noise(keys, torch.arange(VOCAB_SIZE)).argmax(dim=1)
    assert len(set(keys)) == len(keys)
    assert best.unique().numel() == len(keys)


def test_streams_of_many_seeds_never_meet() -> None:
    """Catches two seeds that share one stream a few positions apart: a key must hold more than 32 bits."""
    num_seeds, num_positions = 60_000, 6
    keys = {stream_key(seed, position) for seed in range(num_seeds) for position in range(num_positions)}
    assert len(keys) == num_seeds * num_positions


@pytest.mark.parametrize("position", [0, 1, 4_095])
def test_argmax_over_seeds_follows_the_softmax(position: int) -> None:
    """Catches noise whose seeds are related, so that many requests at one position share their luck."""
    keys = [stream_key(seed, position) for seed in range(NUM_DRAWS)]
    assert chi_square(gumbel_noise(keys, TOKEN_IDS)) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("seed", SEEDS)
def test_argmax_over_positions_follows_the_softmax(seed: int) -> None:
    """Catches noise that repeats or drifts along one text."""
    keys = [stream_key(seed, position) for position in range(NUM_DRAWS)]
    assert chi_square(gumbel_noise(keys, TOKEN_IDS)) < CHI_SQUARE_LIMIT


def test_argmax_over_large_seeds_follows_the_softmax() -> None:
    """Catches noise that reads only the low word of a seed."""
    rng = random.Random(0)
    keys = [stream_key(rng.randrange(2**63), 5) for _ in range(NUM_DRAWS)]
    assert chi_square(gumbel_noise(keys, TOKEN_IDS)) < CHI_SQUARE_LIMIT
    keys = [stream_key(high << 32, 5) for high in range(NUM_DRAWS)]
    assert chi_square(gumbel_noise(keys, TOKEN_IDS)) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("axis", ["position", "token", "low word of the seed", "high word of the seed"])
def test_neighbours_are_uncorrelated(axis: str) -> None:
    """Catches neighbouring keys with like noise, which a test of each draw alone does not see."""
    count, ids = 2_000, torch.arange(64)
    keys = {
        "position": [stream_key(9, step) for step in range(count)],
        "token": [stream_key(9, 3)],
        "low word of the seed": [stream_key(step, 3) for step in range(count)],
        "high word of the seed": [stream_key(step << 32, 3) for step in range(count)],
    }[axis]
    noise = (
        gumbel_noise(keys, ids).double() if axis != "token" else gumbel_noise(keys, torch.arange(128_000)).T.double()
    )
    noise = (noise - noise.mean()) / noise.std()
    for lag in (1, 2, 3, 4, 8, 16, 64):
        product = noise[lag:] * noise[:-lag]
        assert abs(float(product.mean())) < 4.5 / math.sqrt(product.numel())


def test_moments_are_gumbel() -> None:
    """Catches a wrong offset, sign or base of a logarithm."""
    noise = gumbel_noise([stream_key(seed, 0) for seed in range(8)], torch.arange(VOCAB_SIZE)).double()
    limit = 4.5 / math.sqrt(noise.numel())
    assert abs(float(noise.mean()) - 0.5772156649) < limit * math.pi / math.sqrt(6)
    assert abs(float(noise.var()) - math.pi**2 / 6) < limit * math.sqrt(22 / 5) * math.pi**2 / 6  # kurtosis is 27 / 5


@pytest.mark.parametrize(("word", "noise"), [(0, -math.log(33 * math.log(2))), (WORD, 33 * math.log(2))])
def test_extreme_words_are_finite(word: int, noise: float) -> None:
    """Catches a uniform rounded to 0 or 1, whose infinite noise would override every logit."""
    token_id = inverse_lowbias32(inverse_lowbias32(word))
    value = gumbel_noise([(0, 0)], torch.tensor([token_id]))
    assert value.item() == pytest.approx(noise, rel=1e-6)
