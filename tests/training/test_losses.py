from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eyas.training.losses import hard_cross_entropy, soft_cross_entropy, target_distribution

HIDDEN, DRAFT_VOCAB = 6, 11
SEVERAL_BLOCKS = 300  # rows are processed in blocks of 128, the last one ragged


def make_case(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(DRAFT_VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    target_logits = 3 * torch.randn(rows, DRAFT_VOCAB, generator=generator, dtype=torch.float64)
    row_weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    row_weights[::3] = 0.0
    return states, weight, target_distribution(target_logits), row_weights


def loss_by_hand(states: Tensor, weight: Tensor, target_probs: Tensor, row_weights: Tensor) -> float:
    """One row and one id at a time, with the standard library's logarithm."""
    total = 0.0
    for state, probs, row_weight in zip(states, target_probs, row_weights, strict=True):
        scores = [sum(a * b for a, b in zip(state.tolist(), row.tolist(), strict=True)) for row in weight]
        log_total = math.log(sum(math.exp(score) for score in scores))
        total -= float(row_weight) * sum(p * (s - log_total) for p, s in zip(probs.tolist(), scores, strict=True))
    return total


@pytest.mark.parametrize("rows", [0, 1, SEVERAL_BLOCKS])
def test_loss_equals_a_naive_loop(rows: int) -> None:
    """Catches a wrong sign, weight or normalisation, and rows lost between blocks or in an empty batch."""
    states, weight, target_probs, row_weights = make_case(rows)
    loss, agrees = soft_cross_entropy(states, weight, target_probs, row_weights)
    assert float(loss) == pytest.approx(loss_by_hand(states, weight, target_probs, row_weights), abs=1e-9)
    assert agrees.tolist() == ((states @ weight.T).argmax(1) == target_probs.argmax(1)).tolist()


def test_gradients_equal_those_of_autograd() -> None:
    """Catches an error in the hand-written gradient towards states or weight, and an outer factor that gets lost."""
    states, weight, target_probs, row_weights = make_case(SEVERAL_BLOCKS)
    leaves = [states.requires_grad_(), weight.requires_grad_()]
    loss, _ = soft_cross_entropy(states, weight, target_probs, row_weights)
    actual = torch.autograd.grad(0.64 * loss, leaves)
    log_probs = (states @ weight.T).log_softmax(1)
    expected = torch.autograd.grad(-0.64 * (row_weights[:, None] * target_probs * log_probs).sum(), leaves)
    torch.testing.assert_close(actual, expected)


def test_a_bias_shifts_the_logits() -> None:
    """Catches a bias that reaches the loss but not the gradient, or the other way round."""
    states, weight, target_probs, row_weights = make_case(SEVERAL_BLOCKS)
    bias = torch.linspace(-2.0, 2.0, DRAFT_VOCAB, dtype=torch.float64)
    loss, _ = soft_cross_entropy(states.requires_grad_(), weight, target_probs, row_weights, bias)
    log_probs = (states @ weight.T + bias).log_softmax(1)
    expected = -(row_weights[:, None] * target_probs * log_probs).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, states), torch.autograd.grad(expected, states))


def test_bfloat16_stays_close() -> None:
    """Catches sums taken in bfloat16, which would lose whole digits over a long vocabulary."""
    case = [x.float() for x in make_case(SEVERAL_BLOCKS)]
    exact, _ = soft_cross_entropy(*case)
    loss, _ = soft_cross_entropy(*(x.bfloat16() for x in case))
    assert float(loss) == pytest.approx(float(exact), rel=0.01)


@pytest.mark.parametrize("rows", [0, 1, SEVERAL_BLOCKS])
def test_hard_loss_equals_a_naive_loop(rows: int) -> None:
    """Catches a token that is not scored (-1) taken for the last one, and rows lost between blocks."""
    states, weight, _, row_weights = make_case(rows)
    tokens = torch.randint(-1, DRAFT_VOCAB, (rows,), generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-2.0, 2.0, DRAFT_VOCAB, dtype=torch.float64)
    loss, agrees = hard_cross_entropy(states, weight, tokens, row_weights, bias)
    expected = 0.0
    for state, token, row_weight in zip(states, tokens.tolist(), row_weights.tolist(), strict=True):
        scores = [float(state @ row) + extra for row, extra in zip(weight, bias.tolist(), strict=True)]
        if token >= 0:
            expected += row_weight * (math.log(sum(math.exp(score) for score in scores)) - scores[token])
    assert float(loss) == pytest.approx(expected, abs=1e-9)
    assert agrees.tolist() == ((states @ weight.T).argmax(1) == tokens).tolist()


@pytest.mark.parametrize("is_hard", [False, True])
def test_gradients_are_those_of_finite_differences(is_hard: bool) -> None:
    """Catches an error in the hand-written gradients, those of rows without a scored token included."""
    states, weight, target_probs, row_weights = make_case(6)
    tokens = torch.tensor([0, 3, -1, 10, 3, -1])

    def loss(states: Tensor, weight: Tensor) -> Tensor:
        if is_hard:
            return hard_cross_entropy(states, weight, tokens, row_weights)[0]
        return soft_cross_entropy(states, weight, target_probs, row_weights)[0]

    assert torch.autograd.gradcheck(loss, (states.requires_grad_(), weight.requires_grad_()))


def test_agreement_is_judged_without_the_bias() -> None:
    """Catches a sampled id that counts as the head's first candidate because it stands for many."""
    scores, bias = torch.tensor([[1.0, 0.5]]), torch.tensor([0.0, 3.0])
    probs = torch.tensor([[0.4, 0.6]])
    favourite = torch.tensor([0])
    assert soft_cross_entropy(scores, torch.eye(2), probs, torch.ones(1), bias, favourite)[1].tolist() == [True]
    assert hard_cross_entropy(scores, torch.eye(2), favourite, torch.ones(1), bias)[1].tolist() == [True]
