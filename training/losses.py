"""Losses of a level's scores, fused with the output projection.

For scores z = s W^T every loss here has a gradient towards z that comes out of the same softmax as the loss. Both come
out of one pass over blocks of rows small enough for the cache; the logits of a whole batch never exist, nor does their
gradient unless the projection is trained.

Letters: R rows, H hidden, Vd scored ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_ROWS = 128


class RowLoss(Protocol):
    """Loss of a block of rows, given their scores."""

    def __call__(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Losses `[R]` and the gradient of each towards its scores `[R, Vd]`; the latter may be overwritten."""


def target_distribution(logits: Tensor) -> Tensor:
    """The target's softmax renormalised over the scored ids, from its logits there `[R, Vd]`."""
    return logits.softmax(dim=-1)


def soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    target_probs: Tensor,
    row_weights: Tensor,
    bias: Tensor | None = None,
    favourites: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of the cross-entropy of `softmax(states weight^T + bias)` against `target_probs`.

    It is their Kullback-Leibler divergence and the target's entropy, which no training changes.

    Args:
        states: normed states `[R, H]`.
        weight: output projection `[Vd, H]`.
        target_probs: `[R, Vd]`, rows sum to 1.
        row_weights: `[R]`; 0 drops a row.
        bias: `[Vd]`, not trained: makes one column stand for several in the sum of the softmax, not in the ranking.
        favourites: the target's, columns, int64 `[R]`; None takes the most probable ones.

    Returns:
        The loss, a scalar, and where the favourite has the highest of `states weight^T`, bool `[R]`.
    """
    favourites = target_probs.argmax(dim=-1) if favourites is None else favourites
    return fused_loss(states, weight, row_weights, favourites, SoftCrossEntropy(target_probs, bias))


def hard_cross_entropy(
    states: Tensor, weight: Tensor, tokens: Tensor, row_weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of `-log softmax(states weight^T + bias)` of one token.

    Args:
        tokens: columns, int64 `[R]`; rows of -1, whose token is not scored, are dropped.

    Returns:
        As `soft_cross_entropy`; the favourite is the token.
    """
    return fused_loss(states, weight, row_weights, tokens, HardCrossEntropy(tokens, bias))


@dataclass(frozen=True, slots=True)
class SoftCrossEntropy:
    """A `RowLoss`, see `soft_cross_entropy`."""

    target_probs: Tensor
    bias: Tensor | None

    def __call__(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        probs = self.target_probs[rows].to(scores.dtype)
        if self.bias is not None:
            scores += self.bias
        highest = scores.amax(dim=-1, keepdim=True)
        expected = torch.linalg.vecdot(probs, scores)
        exponentials = scores.sub_(highest).exp_()
        totals = exponentials.sum(dim=-1, keepdim=True)
        losses = (highest + totals.log()).squeeze(1) * probs.sum(dim=-1) - expected
        return losses, exponentials.div_(totals).sub_(probs)


@dataclass(frozen=True, slots=True)
class HardCrossEntropy:
    """A `RowLoss`, see `hard_cross_entropy`."""

    tokens: Tensor
    bias: Tensor | None

    def __call__(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        tokens = self.tokens[rows]
        return token_loss(scores if self.bias is None else scores.add_(self.bias), tokens)


def token_loss(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`-log softmax` at one column a row, int64 `[R]`, and its gradient; zeros where that is -1.

    `scores` may hold -inf, but not at `tokens`; they are overwritten.
    """
    is_scored, columns = tokens >= 0, tokens.clamp(min=0)[:, None]
    losses = scores.logsumexp(dim=-1) - scores.gather(1, columns).squeeze(1)
    gradient = torch.softmax(scores, dim=-1)
    gradient.scatter_add_(1, columns, gradient.new_full(columns.shape, -1.0))
    return torch.where(is_scored, losses, 0.0), gradient.mul_(is_scored[:, None])


def fused_loss(
    states: Tensor, weight: Tensor, row_weights: Tensor, favourites: Tensor, row_loss: RowLoss
) -> tuple[Tensor, Tensor]:
    """Weighted sum of a loss over rows, a scalar, and where the favourite is the first candidate, bool `[R]`.

    Args:
        favourites: columns, int64 `[R]`; -1 is nobody's.
        row_loss: constant in everything but the scores; sums are taken in float32 at least.
    """
    loss, agrees = _FusedLoss.apply(states, weight, row_weights, favourites, row_loss)
    return loss, agrees


class _FusedLoss(torch.autograd.Function):
    """Forward computes the gradients too: they need the same softmax."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, row_weights: Tensor, favourites: Tensor, row_loss: RowLoss
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        states_gradient = torch.empty_like(states) if needs_states else None
        # One product over all rows is twice as fast for the weight, but its logits' gradient must be kept.
        kept = states.new_empty(states.shape[0], weight.shape[0]) if needs_weight else None
        agrees = torch.empty(states.shape[0], dtype=torch.bool, device=states.device)
        loss = torch.zeros((), dtype=wide, device=states.device)
        for first in range(0, states.shape[0], _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            scores = F.linear(states[rows], weight).to(wide)
            best, weights = favourites[rows, None], row_weights[rows].to(wide)
            is_highest = scores.gather(1, best.clamp(min=0)) >= scores.amax(dim=-1, keepdim=True)
            agrees[rows] = (is_highest & (best >= 0)).squeeze(1)
            losses, gradient = row_loss(scores, rows)
            loss += torch.dot(losses, weights)
            gradient = gradient.mul_(weights[:, None]).to(states.dtype)
            if states_gradient is not None:
                states_gradient[rows] = gradient @ weight
            if kept is not None:
                kept[rows] = gradient
        ctx.save_for_backward(states_gradient, None if kept is None else kept.t() @ states)
        ctx.mark_non_differentiable(agrees)
        return loss, agrees

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        states_gradient, weight_gradient = (
            None if saved is None else saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors
        )
        return states_gradient, weight_gradient, None, None, None
