from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.training import candidate_factors
from eyas.training.candidate_factors import CandidateFactors

NUM_ROWS, HIDDEN, RANK, NUM_STATES, NUM_CANDIDATES = 41, 12, 5, 9, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(factors: CandidateFactors) -> Tensor:
    return factors.up.detach() @ factors.down.detach()


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 7])
@pytest.mark.parametrize("rank", [1, RANK])
def test_the_first_factors_are_the_best_of_their_rank(rank: int, num_rows: int) -> None:
    """Catches directions that are not the greatest, or singular values taken twice or not at all (Eckart, Young)."""
    output = random(num_rows, HIDDEN)
    factors = CandidateFactors.of(output, rank)
    assert factors.down.shape == (rank, HIDDEN)
    assert factors.up.shape == (num_rows, rank)
    left, singular, right = torch.linalg.svd(output, full_matrices=False)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank]
    torch.testing.assert_close(product(factors), best, rtol=1e-4, atol=1e-4)
    error = (product(factors) - output).square().sum()
    torch.testing.assert_close(error, singular[rank:].square().sum(), rtol=1e-4, atol=1e-4)


def test_both_factors_are_of_one_size() -> None:
    """Catches all of the scale in one factor, which the optimiser, of one step for both, would move too slowly."""
    factors = CandidateFactors.of(1000 * random(NUM_ROWS, HIDDEN), RANK)
    torch.testing.assert_close(factors.up.norm(dim=0), factors.down.norm(dim=1))


def test_a_projection_of_lower_rank_has_finite_factors() -> None:
    """Catches a division by a singular value of zero."""
    output = random(NUM_ROWS, HIDDEN)
    output[:, 2:] = 0
    factors = CandidateFactors.of(output, RANK)
    assert all(bool(weight.isfinite().all()) for weight in factors.parameters())
    torch.testing.assert_close(product(factors), output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_rows", [512, 4])
def test_gradients_are_those_of_the_divergence(block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a divergence or a gradient of the wrong sign, direction or row, and blocks that are lost or doubled."""
    monkeypatch.setattr(candidate_factors, "_BLOCK_ROWS", block_rows)
    output, states = 2 * random(NUM_ROWS, HIDDEN), random(NUM_STATES, HIDDEN, seed=1)
    weights = torch.arange(NUM_STATES).float()  # the first row is dropped
    factors, plain = CandidateFactors.of(output, RANK), CandidateFactors.of(output, RANK)
    value, _ = factors.divergence(states, output, weights, NUM_CANDIDATES)
    full, low = (states @ output.T).log_softmax(-1), (states @ plain.down.T @ plain.up.T).log_softmax(-1)
    expected = F.kl_div(low, full, reduction="none", log_target=True).sum(-1) @ weights
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    (3 * value).backward()
    (3 * expected).backward()
    torch.testing.assert_close(factors.down.grad, plain.down.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(factors.up.grad, plain.up.grad, rtol=1e-4, atol=1e-4)


def test_recall_is_the_share_of_first_tokens_found() -> None:
    """Catches candidates of the wrong factor order, and the first token of the factors in place of the full one's."""
    output, states = random(NUM_ROWS, HIDDEN), random(200, HIDDEN, seed=1)
    factors = CandidateFactors.of(output, 3)
    _, recalled = factors.divergence(states, output, torch.ones(200), NUM_CANDIDATES)
    approximate = states @ product(factors).T
    for row, best in enumerate((states @ output.T).argmax(-1).tolist()):
        num_better = int((approximate[row] > approximate[row, best]).sum())
        assert bool(recalled[row]) == (num_better < NUM_CANDIDATES)
    assert 0.2 < float(recalled.float().mean()) < 0.98


def test_exact_factors_find_everything() -> None:
    """Catches a divergence that is not 0, or a recall below 1, where the factors lose nothing."""
    output, states = random(NUM_ROWS, HIDDEN - 1) @ random(HIDDEN - 1, HIDDEN, seed=2), random(NUM_STATES, HIDDEN)
    factors = CandidateFactors.of(output, HIDDEN - 1)
    value, recalled = factors.divergence(states, output, torch.ones(NUM_STATES), 1)
    assert abs(value.item()) < 1e-4
    assert bool(recalled.all())


@pytest.mark.parametrize(("num_rows", "rank"), [(NUM_ROWS, 0), (NUM_ROWS, HIDDEN), (7, 8)])
def test_other_ranks_are_refused(num_rows: int, rank: int) -> None:
    """Catches factors as large as the projection itself, which could save nothing."""
    with pytest.raises(ValueError, match=f"rank: must be from 1 to .* got {rank}"):
        CandidateFactors.of(random(num_rows, HIDDEN), rank)
