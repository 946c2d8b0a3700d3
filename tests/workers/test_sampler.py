"""All samples here are fixed by their seeds, so a statistical test either always passes or always fails."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from eyas.kernels.noise import gumbel_noise, stream_key
from eyas.workers.sampler import NoiseRanker, RowSampling, choose_tokens, nucleus, perturbed_logits
from eyas.workers.sampling import SamplingParams

LOGITS = torch.tensor([1.0, -0.5, 2.2, 0.3, -3.0, 1.7])
NUM_DRAWS = 8_000
# Exceeded once in 10 000 fair samples; the key is the degrees of freedom.
CHI_SQUARE_LIMITS = {1: 15.1, 2: 18.4, 3: 21.1, 5: 25.7}
GREEDY = SamplingParams()


def rows_of(params: SamplingParams, positions: list[int]) -> RowSampling:
    return RowSampling([params] * len(positions), positions)


def draw(logits: Tensor, temperature: float, top_p: float, by: str) -> Tensor:
    """Many draws, over the seeds of as many requests or over the positions of one."""
    params = [SamplingParams(temperature, top_p, seed if by == "seed" else 77) for seed in range(NUM_DRAWS)]
    positions = [5] * NUM_DRAWS if by == "seed" else list(range(NUM_DRAWS))
    return choose_tokens(logits.expand(NUM_DRAWS, -1), RowSampling(params, positions))


def nucleus_probs(temperature: float, top_p: float) -> Tensor:
    """What draws should be distributed as: softmax of the likeliest tokens that reach `top_p`, the others never."""
    probs = (LOGITS.double() / temperature).softmax(-1)
    kept: list[int] = []
    for token in probs.argsort(descending=True).tolist():
        if sum(float(probs[other]) for other in kept) >= top_p:
            break
        kept.append(token)
    mask = torch.zeros_like(probs).index_fill(0, torch.tensor(kept), 1.0)
    return probs * mask / (probs * mask).sum()


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 1.0), (1.0, 0.9), (0.7, 0.75), (1.0, 0.6), (1.0, 0.05)]
)
def test_draws_follow_the_distribution(temperature: float, top_p: float, by: str) -> None:
    """Catches temperature applied to the noise, a nucleus before temperature, and tokens outside the nucleus."""
    expected = nucleus_probs(temperature, top_p) * NUM_DRAWS
    counts = draw(LOGITS, temperature, top_p, by).bincount(minlength=LOGITS.numel()).double()
    possible = expected > 0
    assert not bool(counts[~possible].any())
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return
    distance = float(((counts - expected) ** 2 / expected)[possible].sum())
    assert distance < CHI_SQUARE_LIMITS[freedom]


def test_successive_draws_are_independent() -> None:
    """Catches noise shared by neighbouring positions, which would bias what follows each token."""
    tokens = draw(LOGITS[:3], 1.0, 1.0, by="position")
    pairs = (3 * tokens[0::2] + tokens[1::2]).bincount(minlength=9).double()
    probs = LOGITS[:3].double().softmax(-1)
    expected = torch.outer(probs, probs).flatten() * pairs.sum()
    assert float(((pairs - expected) ** 2 / expected).sum()) < 31.8  # eight degrees of freedom, once in 10 000


def test_greedy_rows_are_left_alone() -> None:
    """Catches noise, temperature or a nucleus on greedy rows that share a step with sampled ones."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose_tokens(logits, rows_of(GREEDY, list(range(6)))), logits.argmax(-1))
    mixed = [GREEDY if row % 2 else SamplingParams(1.0, 0.5, row) for row in range(6)]
    rows = RowSampling(mixed, list(range(6)))
    perturbed = perturbed_logits(logits, rows, torch.arange(50))
    assert torch.equal(perturbed[1::2], logits[1::2])
    assert torch.equal(choose_tokens(logits, rows)[1::2], logits.argmax(-1)[1::2])
    assert choose_tokens(logits.bfloat16(), rows).tolist()[1::2] == logits.bfloat16().argmax(-1).tolist()[1::2]


def test_text_does_not_depend_on_the_batch() -> None:
    """Catches a row whose token changes with its neighbours in the step: their noise, temperature or nucleus."""
    generator = torch.Generator().manual_seed(3)
    params = [GREEDY, *(SamplingParams(t, p, s) for s, (t, p) in enumerate([(0.7, 1.0), (1.0, 0.9), (2.0, 1.0)]))]
    rng = random.Random(0)
    choices = [rng.choice(params) for _ in range(60)]
    positions = [rng.randrange(9) for _ in range(60)]
    logits = 3.0 * torch.randn(60, 2000, generator=generator)
    together = choose_tokens(logits, RowSampling(choices, positions))
    for row in range(60):
        alone = choose_tokens(logits[row : row + 1], RowSampling([choices[row]], [positions[row]]))
        assert int(alone) == int(together[row])


def test_whole_distribution_is_kept_beside_a_nucleus() -> None:
    """Catches a request without top_p losing its rare tokens when another request of the step has a nucleus.

    The likeliest token's probability rounds to one in float32, as it does wherever a model is certain.
    """
    logits = torch.tensor([[0.0, -18.0, -19.0], [0.0, 0.0, 0.0]])
    whole, other = SamplingParams(1.0, 1.0, 4), SamplingParams(1.0, 0.5, 4)
    token_ids = torch.arange(3)
    alone = perturbed_logits(logits[:1], RowSampling([whole], [0]), token_ids)
    assert bool(alone.isfinite().all())
    together = perturbed_logits(logits, RowSampling([whole, other], [0, 0]), token_ids)
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize(
    ("logits", "top_p", "kept"),
    [
        ([2.0, 1.0, 1.0, 1.0, 0.0], 0.5, [0, 1, 2, 3]),
        ([1.0, 1.0, 1.0, 1.0], 0.3, [0, 1, 2, 3]),
        ([3.0, 1.0, 1.0, 0.0], 0.1, [0]),
        ([5.0, 5.0, 0.0], 0.3, [0, 1]),
        ([0.0, 9.0, 0.0], 0.999999, [0, 1, 2]),
        ([0.0, 1.0, 2.0], 1.0, [0, 1, 2]),
    ],
)
def test_ties_at_the_edge_stay(logits: list[float], top_p: float, kept: list[int]) -> None:
    """Catches a nucleus that depends on how a sort orders equal logits, or ends one token early."""
    result = nucleus(torch.tensor([logits, logits[::-1]]), torch.tensor([top_p, top_p]))
    assert result[0].isfinite().nonzero().flatten().tolist() == kept
    assert torch.equal(result[1].flip(0), result[0])


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_wide_nucleus_is_found(top_p: float) -> None:
    """Catches a nucleus cut at the number of tokens that are sorted first."""
    flat = 0.01 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    peaked = flat.clone()
    peaked[0, 17] = 20.0
    for logits in (flat, peaked):
        kept = nucleus(logits, torch.tensor([top_p, top_p])).isfinite()
        for row in range(2):
            probs = logits[row].double().softmax(-1)
            mass = float(probs[kept[row]].sum())
            smallest = float(probs[kept[row]].min())
            assert mass >= top_p - 1e-6
            assert mass - smallest < top_p + 1e-6


def test_siblings_share_their_noise() -> None:
    """Catches noise keyed by node or path: a draft would then no longer be what the target itself would draw."""
    params = SamplingParams(0.8, 1.0, 123)
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    rows = RowSampling([params] * 4, [9, 9, 10, 9])
    noise = perturbed_logits(logits, rows, torch.arange(30)) - logits / 0.8
    expected = gumbel_noise([stream_key(123, 9), stream_key(123, 10)], torch.arange(30))
    for row, position in enumerate([0, 0, 1, 0]):
        torch.testing.assert_close(noise[row], expected[position], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_perfect_head_guesses_the_targets_token(temperature: float, top_p: float) -> None:
    """Catches candidates ranked without the target's noise, temperature or nucleus, or under another position's."""
    logits = 2.0 * torch.randn(200, 40, generator=torch.Generator().manual_seed(5))
    rows = rows_of(SamplingParams(temperature, top_p, 99), list(range(200)))
    candidates = NoiseRanker(rows, 3).rank(logits, torch.arange(40))
    assert torch.equal(candidates.tokens[:, 0], choose_tokens(logits, rows))


def test_reduced_vocabulary_sees_the_same_noise() -> None:
    """Catches noise keyed by column instead of token id: the head's columns are not the target's."""
    candidate_ids = torch.arange(40)[1::3]
    logits = torch.randn(100, 40, generator=torch.Generator().manual_seed(6))
    rows = rows_of(SamplingParams(1.0, 1.0, 7), list(range(100)))
    chosen = choose_tokens(logits, rows)
    best = NoiseRanker(rows, 2).rank(logits[:, candidate_ids], candidate_ids).tokens[:, 0]
    known = torch.isin(chosen, candidate_ids)
    assert 20 < int(known.sum()) < 60
    assert torch.equal(best[known], chosen[known])


def test_candidates_are_scored_by_their_perturbed_share() -> None:
    """Catches scores of the unperturbed distribution, and candidates that repeat or come out of order."""
    candidate_ids = torch.tensor([3, 5, 8, 13, 21])
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(8))
    rows = RowSampling([GREEDY, SamplingParams(0.5, 1.0, 1), SamplingParams(1.0, 0.7, 2)], [4, 4, 6])
    perturbed = perturbed_logits(logits, rows, candidate_ids)
    candidates = NoiseRanker(rows, 4).rank(logits, candidate_ids)
    expected, columns = perturbed.log_softmax(-1).sort(descending=True)
    torch.testing.assert_close(candidates.log_probs, expected[:, :4], rtol=1e-5, atol=1e-5)
    possible = candidates.log_probs.isfinite()
    assert torch.equal(candidates.tokens[possible], candidate_ids[columns][:, :4][possible])
    assert all(len(set(row)) == 4 for row in candidates.tokens.tolist())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be between 0 and 100"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -1}, "seed must be between"),
        ({"seed": 2**63}, "seed must be between"),
    ],
)
def test_parameters_out_of_range_are_refused(fields: dict[str, float], message: str) -> None:
    """Catches a value that would divide by zero, keep no token, or not fit the noise's key."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-8, 1e-38, 1e-300])
def test_nearly_zero_temperature_is_greedy(temperature: float, top_p: float) -> None:
    """Catches logits that overflow when divided, after which any token with a positive one is drawn."""
    rows = rows_of(SamplingParams(temperature, top_p, seed=3), [5])
    assert choose_tokens(LOGITS[None], rows).item() == LOGITS.argmax().item()
    assert not NoiseRanker(rows, 3).rank(LOGITS[None], torch.arange(6)).log_probs.isnan().any()
