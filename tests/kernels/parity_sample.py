"""Parity of the sampling kernels with `kernels.sample`."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import sample, triton_sample
from eyas.kernels.triton_sample import BLOCK

VOCAB_SIZE = 151_936
NOISE_ULPS = 1  # two float64 logarithms that differ in their last bit may round to neighbouring float32 numbers
SCORE_TOLERANCE = 2e-6  # what one such step of the largest draws, 22.9, adds to a score
SEEDS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**62, 2**63 - 1, -1, -(2**63)]

Check = Callable[[], None]
CASES: list[ParityCase] = []


def regime(operation: str, name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES.append(ParityCase(operation, "triton", name, check))
        return check

    return add


def random_logits(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = 3.0 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    return logits.to(dtype).to(DEVICE)


def keys(rows: int, temperatures: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds and positions, each list repeated over the rows."""
    return (
        torch.tensor(temperatures).repeat(rows)[:rows].to(DEVICE),
        torch.tensor(SEEDS).repeat(rows)[:rows].to(DEVICE),
        (7 * torch.arange(rows) + (torch.arange(rows) % 3 << 31)).to(DEVICE),
    )


def agree(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> sample.SampledTokens:
    """Rows that are not finite may get any valid token."""
    expected = sample.sample_tokens(logits, temperatures, seeds, positions)
    sampled = triton_sample.sample_tokens(logits, temperatures, seeds, positions)
    assert sampled.tokens.dtype == torch.int64
    assert sampled.is_finite.dtype == torch.bool
    assert torch.equal(sampled.is_finite, expected.is_finite)
    assert torch.equal(sampled.tokens[expected.is_finite], expected.tokens[expected.is_finite])
    assert bool(((sampled.tokens >= 0) & (sampled.tokens < logits.shape[1])).all())
    return sampled


def scores_agree(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    expected = sample.perturb(logits, temperatures, seeds, positions, token_ids)
    perturbed = triton_sample.perturb(logits, temperatures, seeds, positions, token_ids)
    assert perturbed.dtype == torch.float32
    torch.testing.assert_close(perturbed, expected, rtol=2e-7, atol=SCORE_TOLERANCE, equal_nan=True)
    greedy = temperatures == 0
    assert torch.equal(perturbed[greedy].view(torch.int32), logits[greedy].float().view(torch.int32))


@regime("sample", "ties")
def check_ties() -> None:
    """Catches a later id winning: in one lane of two blocks, within a block, and across the splits of a row."""
    winners = [[0], [5, 5 + BLOCK], [BLOCK - 1, BLOCK], [BLOCK + 7, 2 * BLOCK - 1, 2 * BLOCK], [900, 901]]
    logits = torch.zeros(len(winners), 3 * BLOCK + 13, device=DEVICE)
    for row, ids in enumerate(winners[1:], start=1):
        logits[row, ids] = 1.0
    for num_programs in (1024, 10, 1):  # four splits of a row, two, one
        with patch.object(triton_sample, "ENOUGH_PROGRAMS", num_programs):
            sampled = agree(logits, *keys(len(winners), [0.0]))
        assert sampled.tokens.tolist() == [ids[0] for ids in winners]


@regime("sample", "whole vocabulary")
def check_whole_vocabulary() -> None:
    """Catches more splits than the second kernel reads: their tokens are never looked at."""
    logits = random_logits(1, VOCAB_SIZE, torch.bfloat16)
    agree(logits, *keys(1, [0.7]))
    logits[:, VOCAB_SIZE - 5] = 90.0
    assert agree(logits, *keys(1, [0.0])).tokens.tolist() == [VOCAB_SIZE - 5]


@regime("sample", "rows in a view")
def check_padded_rows() -> None:
    """Catches a last block that reads past the vocabulary: what stands there would win every row."""
    padded = torch.full((3, 2 * BLOCK), math.nan, dtype=torch.bfloat16, device=DEVICE)
    logits = padded[:, : BLOCK + 9]
    logits.copy_(random_logits(3, BLOCK + 9, torch.bfloat16))
    assert not logits.is_contiguous()
    assert bool(agree(logits, *keys(3, [0.0, 1.0, 0.7])).is_finite.all())


@regime("sample", "last token")
def check_last_token() -> None:
    """Catches a tail that is never looked at."""
    for size in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        logits = torch.zeros(2, size, device=DEVICE)
        logits[:, -1] = 60.0
        assert agree(logits, *keys(2, [0.0, 1.0])).tokens.tolist() == [size - 1] * 2


@regime("sample", "flat logits")
def check_flat_logits() -> None:
    """Catches any wrong bit of the noise: it alone decides. Every word of seeds and positions is in use."""
    sampled = agree(torch.zeros(40, 1500, device=DEVICE), *keys(40, [1.0, 0.3, 100.0]))
    assert sampled.tokens.unique().numel() > 30


@regime("sample", "temperatures")
def check_temperatures() -> None:
    """Catches temperature applied to the noise, divisors that overflow, and noise on greedy rows."""
    temperatures = [0.0, 1.0, 0.25, 1e-8, 100.0, 1e-38, 0.7]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        agree(random_logits(21, 700, dtype), *keys(21, temperatures))


@regime("sample", "not finite")
def check_not_finite() -> None:
    """Catches a NaN that loses every comparison, also one that is no lane's best, and masked tokens taken for one."""
    logits = random_logits(16, 2 * BLOCK + 5)
    logits[0, 3] = logits[1, BLOCK + 3] = logits[2, -1] = math.nan
    logits[3, 2] = math.inf
    logits[4] = -math.inf
    logits[5, 1:] = -math.inf
    logits[6, :2000] = -math.inf
    logits[7, 5], logits[7, 9] = math.inf, math.nan
    for temperature in (0.0, 1.0):
        sampled = agree(logits, *keys(16, [temperature]))
        assert sampled.is_finite.tolist() == [False] * 5 + [True, True, False] + [True] * 8


@regime("sample", "rows above the number of programs")
def check_many_rows() -> None:
    """Catches a row without a split, and rows that get their neighbour's temperature, seed or position."""
    with patch.object(triton_sample, "ENOUGH_PROGRAMS", 8):
        agree(random_logits(20, BLOCK + 9), *keys(20, [0.0, 0.0, 1.0]))


@regime("sample", "no rows")
def check_no_rows() -> None:
    """Catches a launch of nothing, as steps that end no prompt and verify no tree have."""
    assert agree(random_logits(0, 50), *keys(0, [1.0])).tokens.shape == (0,)


@regime("perturb", "noise alone")
def check_noise() -> None:
    """Catches a wrong bit of the noise, ids or seeds cut to less than they are, and logarithms in float32."""
    token_ids = torch.cat([torch.arange(300), torch.arange(VOCAB_SIZE - 300, VOCAB_SIZE)]).to(DEVICE)
    temperatures, seeds, positions = keys(30, [1.0])
    logits = torch.zeros(30, 600, device=DEVICE)
    expected = sample.perturb(logits, temperatures, seeds, positions, token_ids)
    perturbed = triton_sample.perturb(logits, temperatures, seeds, positions, token_ids)
    # Neighbouring float32 numbers of one sign are neighbouring integers.
    assert torch.equal(perturbed < 0, expected < 0)
    steps = (perturbed.view(torch.int32).long() - expected.view(torch.int32).long()).abs()
    assert int(steps.max()) <= NOISE_ULPS


@regime("perturb", "reduced vocabulary")
def check_reduced_vocabulary() -> None:
    """Catches noise keyed by column, in blocks after the first as well; temperatures mix."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randperm(VOCAB_SIZE, generator=generator)[: BLOCK + 77].to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scores_agree(random_logits(4, BLOCK + 77, dtype), *keys(4, [0.0, 1.0, 0.5, 1e-38]), token_ids)


@regime("perturb", "ids of each row")
def check_own_ids() -> None:
    """Catches the first row's ids used for all, and rows found without their stride, of logits or ids."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (5, 200), generator=generator).to(DEVICE)
    logits = random_logits(5, 300)
    scores_agree(logits[:, :128], *keys(5, [0.8, 0.0]), ids[:, :128])


@regime("perturb", "not finite")
def check_perturbed_not_finite() -> None:
    """Catches masked tokens or faults that noise makes look like others."""
    logits = random_logits(4, 50)
    logits[:, ::7] = -math.inf
    logits[1, 3], logits[2, 4] = math.nan, math.inf
    scores_agree(logits, *keys(4, [1.0, 0.7]), torch.arange(50, device=DEVICE))


@regime("perturb", "nothing to do")
def check_empty() -> None:
    """Catches a launch of nothing, and a single column."""
    for rows, columns in ((0, 8), (3, 0), (1, 1)):
        scores_agree(random_logits(rows, columns), *keys(rows, [1.0]), torch.arange(columns, device=DEVICE))
