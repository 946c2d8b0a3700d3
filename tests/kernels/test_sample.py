"""The reference forms against the host's own choice; the Triton ones are compared with these in `parity_sample`."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from eyas.kernels.noise import gumbel_noise, stream_key
from eyas.kernels.sample import nucleus, perturb, sample_tokens
from eyas.workers import sampler
from eyas.workers.sampler import RowSampling, choose_tokens, perturbed_logits
from eyas.workers.sampling import SamplingParams

VOCAB_SIZE = 3_000  # above what the host's nucleus sorts first


def mixed_rows(num_rows: int, top_ps: tuple[float, ...] = (1.0,)) -> RowSampling:
    """Rows of several requests, greedy ones among them, some of which share seed and position."""
    rng = random.Random(num_rows)
    params = [
        SamplingParams(rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.3, 1e-8, 100.0]), rng.choice(top_ps), seed)
        for seed in (0, 1, 2**31, 2**32 + 7, 2**63 - 1, 99)
    ]
    return RowSampling([rng.choice(params) for _ in range(num_rows)], [rng.randrange(40) for _ in range(num_rows)])


def as_tensors(rows: RowSampling) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds and positions."""
    return (
        torch.tensor([params.temperature for params in rows.params]),
        torch.tensor([params.seed for params in rows.params]),
        torch.tensor(rows.positions),
    )


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return 3.0 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_the_hosts(dtype: torch.dtype) -> None:
    """Catches a divisor, key or order of operations by which a captured graph would choose another token."""
    rows, logits = mixed_rows(64), random_logits(64).to(dtype)
    sampled = sample_tokens(logits, *as_tensors(rows))
    assert sampled.tokens.dtype == torch.int64
    assert torch.equal(sampled.tokens, choose_tokens(logits, rows))
    assert bool(sampled.is_finite.all())


def test_perturbed_logits_are_the_hosts() -> None:
    """Catches noise keyed by column instead of token id, and one list of ids read as each row's own."""
    rows, logits = mixed_rows(20), random_logits(20)
    generator = torch.Generator().manual_seed(0)
    own_ids = torch.stack([torch.randperm(151_936, generator=generator)[:VOCAB_SIZE] for _ in range(20)])
    for token_ids in (own_ids[0], own_ids):
        perturbed = perturb(logits, *as_tensors(rows), token_ids)
        assert torch.equal(perturbed, perturbed_logits(logits, rows, token_ids))


def test_nucleus_of_the_scaled_logits_gives_the_hosts_tokens() -> None:
    """Catches rows without a nucleus losing tokens beside rows with one."""
    rows, logits = mixed_rows(64, (1.0, 0.9, 0.5, 0.999)), random_logits(64)
    temperatures, seeds, positions = as_tensors(rows)
    top_p = torch.tensor([params.top_p if params.temperature > 0 else 1.0 for params in rows.params])
    kept = nucleus(logits / temperatures.clamp(min=1e-30)[:, None], top_p)
    cut = logits.masked_fill(kept == -torch.inf, -torch.inf)
    sampled = sample_tokens(cut, temperatures, seeds, positions)
    assert torch.equal(sampled.tokens, choose_tokens(logits, rows))


def test_one_draw_by_hand() -> None:
    """Catches noise of another position, and temperature applied to it."""
    logits, temperature = [0.5, -1.0, 2.0, 0.25], 0.5
    noise = gumbel_noise([stream_key(11, 6)], torch.tensor([8, 3, 5, 1]))[0].tolist()
    perturbed = perturb(
        torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([11]), torch.tensor([6]),
        torch.tensor([8, 3, 5, 1]),
    )  # fmt: skip
    expected = torch.tensor([[score / temperature + draw for score, draw in zip(logits, noise, strict=True)]])
    torch.testing.assert_close(perturbed, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_marked(temperature: float) -> None:
    """Catches a NaN that loses every comparison, and the -inf of masked tokens taken for a fault."""
    logits = torch.zeros(6, 50)
    logits[1, 49] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    logits[5, :2] = torch.tensor([math.inf, math.nan])
    rows = torch.arange(6)
    sampled = sample_tokens(logits, torch.full((6,), temperature), rows, rows)
    assert sampled.is_finite.tolist() == [True, False, False, False, True, False]
    assert int(sampled.tokens[4]) == 0
    assert bool(((sampled.tokens >= 0) & (sampled.tokens < 50)).all())


def test_ties_go_to_the_lowest_id() -> None:
    """Catches an order of ids that depends on how the vocabulary is cut."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, 1_111:] = 1.0
    rows = torch.arange(2)
    assert sample_tokens(logits, torch.zeros(2), rows, rows).tokens.tolist() == [0, 1_111]


def test_no_rows() -> None:
    """Catches a step in which nothing is scored."""
    nothing = torch.zeros(0, dtype=torch.int64)
    sampled = sample_tokens(torch.zeros(0, 8), torch.zeros(0), nothing, nothing)
    assert sampled.tokens.shape == sampled.is_finite.shape == (0,)
    assert perturb(torch.zeros(0, 8), torch.zeros(0), nothing, nothing, torch.arange(8)).shape == (0, 8)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("gain", [0.01, 1.0, 10.0])
def test_nucleus_is_the_hosts(gain: float, top_p: float) -> None:
    """Catches a nucleus that ends elsewhere once the whole vocabulary is sorted, flat or peaked."""
    logits = gain * random_logits(8)
    logits[::2] = logits[::2].round()  # ties
    top_ps = torch.full((8,), top_p)
    assert torch.equal(nucleus(logits, top_ps), sampler.nucleus(logits, top_ps))


def test_whole_distribution_is_kept_bit_for_bit() -> None:
    """Catches a request without top_p losing the tokens that rounding leaves no room for."""
    logits = torch.tensor([[0.0, -18.0, -19.0, -math.inf, -0.0]]).repeat(2, 1)
    kept = nucleus(logits, torch.tensor([1.0, 0.5]))
    assert torch.equal(kept[0].view(torch.int32), logits[0].view(torch.int32))
    assert kept[1].isfinite().tolist() == [True, False, False, False, True]


ROWS = torch.arange(3)
LOGITS = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": LOGITS.double()}, r"logits: expected float32, bfloat16 or float16 \[T, C\]"),
        ({"logits": LOGITS[0]}, r"got torch.float32 \[8\]"),
        ({"logits": torch.zeros(8, 3).T}, "logits: expected adjacent columns"),
        ({"logits": LOGITS[:, :0]}, "logits: expected at least one column"),
        ({"temperatures": torch.ones(3).double()}, r"temperatures: expected torch.float32 \[3\]"),
        ({"temperatures": torch.ones(2)}, r"temperatures: expected torch.float32 \[3\]"),
        ({"seeds": ROWS.int()}, r"seeds: expected torch.int64 \[3\]"),
        ({"positions": torch.arange(6)[::2]}, "positions: expected contiguous"),
    ],
)
def test_rows_that_the_kernels_do_not_read_are_refused(changed: dict[str, Tensor], message: str) -> None:
    """Catches a launch whose address arithmetic does not fit its tensors."""
    pytest.importorskip("triton")
    from eyas.kernels import triton_sample

    arguments = {"logits": LOGITS, "temperatures": torch.ones(3), "seeds": ROWS, "positions": ROWS}
    with pytest.raises(ValueError, match=message):
        triton_sample.sample_tokens(**(arguments | changed))


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (torch.arange(7), r"token_ids: expected int64 \[8\]"),
        (torch.arange(8).int(), r"token_ids: expected int64 \[8\]"),
        (torch.zeros(2, 8).long(), r"token_ids: expected int64 \[3, 8\]"),
        (torch.zeros(8, 3).long().T, "token_ids: expected adjacent columns"),
    ],
)
def test_ids_that_the_kernel_does_not_read_are_refused(token_ids: Tensor, message: str) -> None:
    """Catches noise drawn for other tokens than the columns score."""
    pytest.importorskip("triton")
    from eyas.kernels import triton_sample

    with pytest.raises(ValueError, match=message):
        triton_sample.perturb(LOGITS, torch.ones(3), ROWS, ROWS, token_ids)


def test_float32_decides_what_has_a_nucleus() -> None:
    """Catches an eager step that cuts rare tokens off under a top_p which recorded steps read as 1."""
    logits = torch.tensor([[0.0] + [-40.0] * 9])
    rows = RowSampling([SamplingParams(1.0, 1.0 - 1e-12, 5)], [3])
    assert bool(perturbed_logits(logits, rows, torch.arange(10)).isfinite().all())
