from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eyas.training.losses import hard_cross_entropy, soft_cross_entropy
from eyas.training.tree_loss import tree_cross_entropy

HIDDEN, VOCAB = 5, 9
SEVERAL_BLOCKS = 300


class Case:
    """Random rows in double precision; every seventh row's favourite is not scored."""

    def __init__(self, rows: int, has_bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.states = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
        self.probs = torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64).softmax(1)
        self.favourites = torch.randint(0, VOCAB, (rows,), generator=generator)
        self.favourites[3::7] = -1
        self.row_weights = torch.rand(rows, generator=generator, dtype=torch.float64)
        self.bias = torch.linspace(-1.0, 2.0, VOCAB, dtype=torch.float64) if has_bias else None

    def loss(self, width: int, share: float) -> tuple[Tensor, Tensor]:
        return tree_cross_entropy(
            self.states, self.weight, self.probs, self.row_weights, self.favourites, width, share, self.bias
        )

    def by_hand(self, width: int, share: float) -> Tensor:
        """One row at a time: the k - 1 strongest rivals are struck from a sorted list."""
        total = torch.zeros((), dtype=torch.float64)
        bias = torch.zeros(VOCAB, dtype=torch.float64) if self.bias is None else self.bias
        for state, probs, favourite, row_weight in zip(
            self.states, self.probs, self.favourites.tolist(), self.row_weights, strict=True
        ):
            plain = [torch.dot(state, row) for row in self.weight]
            scores = [score + extra for score, extra in zip(plain, bias, strict=True)]
            soft = -(probs * torch.stack(scores).log_softmax(0)).sum()
            top = torch.zeros((), dtype=torch.float64)
            if favourite >= 0:
                rivals = sorted((i for i in range(VOCAB) if i != favourite), key=lambda i: -float(plain[i].detach()))
                summed = sum((torch.exp(scores[i] - scores[favourite]) for i in rivals[width - 1 :]), start=top)
                top = torch.log1p(summed)
            total = total + row_weight * ((1 - share) * soft + share * top)
        return total


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, VOCAB - 1, VOCAB, VOCAB + 3])
@pytest.mark.parametrize("rows", [0, 1, SEVERAL_BLOCKS])
def test_loss_and_gradients_equal_a_naive_loop(rows: int, width: int, has_bias: bool) -> None:
    """Catches the favourite struck out as its own rival, one rival too many or too few, rivals ranked by what a sampled
    id stands for, an unscored favourite that is taken for the last id, and rows lost between blocks."""
    case = Case(rows, has_bias)
    loss, agrees = case.loss(width, share=0.3)
    expected = case.by_hand(width, share=0.3)
    torch.testing.assert_close(loss, expected)
    assert agrees.tolist() == ((case.states @ case.weight.T).argmax(1) == case.favourites).tolist()
    if rows:
        leaves = [case.states, case.weight]
        torch.testing.assert_close(torch.autograd.grad(0.7 * loss, leaves), torch.autograd.grad(0.7 * expected, leaves))


@pytest.mark.parametrize("width", [1, 3, VOCAB])
def test_gradients_are_those_of_finite_differences(width: int) -> None:
    """Catches a hand-written gradient that shares an error with the loop's."""
    case = Case(8)
    case.row_weights.fill_(1.0)
    for leaves in [(case.states, case.weight), (case.states, case.weight.detach())]:
        assert torch.autograd.gradcheck(
            lambda states, weight: tree_cross_entropy(
                states, weight, case.probs, case.row_weights, case.favourites, width, 0.6
            )[0],
            leaves,
        )


def test_ends_of_the_range() -> None:
    """Catches k = 1 that is not the cross-entropy, a share that mixes the wrong way round, and a loss that remains when
    no id can be left out."""
    case = Case(SEVERAL_BLOCKS)
    hard, _ = hard_cross_entropy(case.states, case.weight, case.favourites, case.row_weights)
    soft, _ = soft_cross_entropy(case.states, case.weight, case.probs, case.row_weights)
    torch.testing.assert_close(case.loss(width=1, share=1.0)[0], hard)
    torch.testing.assert_close(case.loss(width=4, share=0.0)[0], soft)
    assert float(case.loss(width=VOCAB, share=1.0)[0].detach()) == 0.0


def test_ties_cost_the_same_whichever_is_struck_out() -> None:
    """Catches more than k - 1 rivals struck out because they are equal, and a tied favourite counted as its own."""
    states = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = torch.full((VOCAB, VOCAB), 1 / VOCAB, dtype=torch.float64)
    for width in (1, 3, VOCAB):
        for favourite in range(VOCAB):
            one_row = (probs[:1], torch.ones(1, dtype=torch.float64), torch.tensor([favourite]))
            loss, _ = tree_cross_entropy(states[:1], weight, *one_row, width, 1.0)
            assert float(loss.detach()) == pytest.approx(math.log(VOCAB - width + 1))
            (gradient,) = torch.autograd.grad(loss, states)
            assert bool(gradient.isfinite().all())


def test_the_favourite_costs_nothing_once_it_is_well_among_the_first() -> None:
    """Catches rivals ahead of the favourite that still push it, so that k makes no difference."""
    weight = torch.eye(VOCAB)
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, *[-20.0] * (VOCAB - 4)]])
    probs = torch.full((1, VOCAB), 1 / VOCAB)
    fourth = (probs, torch.ones(1), torch.tensor([3]))
    assert float(tree_cross_entropy(scores, weight, *fourth, 4, 1.0)[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(tree_cross_entropy(scores, weight, *fourth, 3, 1.0)[0]) == pytest.approx(1.3133, abs=1e-3)


def recall_of_four_after_training(share: float | None) -> float:
    """Of a head too narrow to rank every row's favourite first: 60 ids, a favourite for every row, 4 dimensions.

    Args:
        share: None trains on the favourites as tokens of the text.
    """
    num_ids, width = 60, 4
    weight = torch.randn(num_ids, 4, generator=torch.Generator().manual_seed(0))
    favourites, row_weights = torch.arange(num_ids), torch.ones(num_ids)
    probs = torch.full((num_ids, num_ids), 0.1 / (num_ids - 1))
    probs[favourites, favourites] = 0.9
    states = torch.zeros(num_ids, 4, requires_grad=True)
    optimizer = torch.optim.Adam([states], lr=0.05)
    for _ in range(300):
        if share is None:
            loss, _ = hard_cross_entropy(states, weight, favourites, row_weights)
        else:
            loss, _ = tree_cross_entropy(states, weight, probs, row_weights, favourites, width, share)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first = (states @ weight.T).topk(width).indices
    return float((first == favourites[:, None]).any(dim=1).float().mean())


def test_a_tree_loss_puts_more_favourites_among_the_first_four() -> None:
    """Catches a surrogate that does no more for a tree than fitting the tokens does."""
    hard, half, whole = (recall_of_four_after_training(share) for share in (None, 0.5, 1.0))
    assert half > hard + 0.05
    assert whole > hard + 0.1
