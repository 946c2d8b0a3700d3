"""Soft cross-entropy against the target's distribution, fused with the output projection.

For logits z = s W^T and target probabilities p, the loss of a row is -sum(p * log_softmax(z)) and its gradient towards
z is softmax(z) - p. Both come out of one pass over blocks of rows small enough for the cache; the logits of a whole
batch never exist.

Letters: R rows, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_ROWS = 128


def target_distribution(logits: Tensor) -> Tensor:
    """The target's softmax renormalised over the draft vocabulary, from its logits there `[R, Vd]`."""
    return logits.softmax(dim=-1)


def soft_cross_entropy(
    states: Tensor, weight: Tensor, target_probs: Tensor, row_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of the cross-entropy of `softmax(states weight^T)` against `target_probs`.

    Args:
        states: normed states `[R, H]`.
        weight: output projection `[Vd, H]`.
        target_probs: `[R, Vd]`, rows sum to 1.
        row_weights: `[R]`; 0 drops a row.

    Returns:
        The loss, a scalar, and where the two distributions have their maximum in common, bool `[R]`.
    """
    loss, agrees = _SoftCrossEntropy.apply(states, weight, target_probs, row_weights)
    return loss, agrees


class _SoftCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients too: they need the same softmax."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target_probs: Tensor, row_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        gradient = target_probs.new_empty(target_probs.shape, dtype=states.dtype) if needs_gradient else None
        agrees = torch.empty(states.shape[0], dtype=torch.bool, device=states.device)
        loss = torch.zeros((), dtype=wide, device=states.device)
        for first in range(0, states.shape[0], _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            scores = F.linear(states[rows], weight).to(wide)
            probs, weights = target_probs[rows].to(wide), row_weights[rows].to(wide)
            best = probs.max(dim=-1).indices[:, None]
            agrees[rows] = (scores.gather(1, best) >= scores.amax(dim=-1, keepdim=True)).squeeze(1)
            log_probs = scores.log_softmax(dim=-1)
            loss -= torch.dot(torch.linalg.vecdot(probs, log_probs), weights)
            if gradient is not None:
                gradient[rows] = log_probs.exp_().sub_(probs).mul_(weights[:, None])
        if gradient is not None:
            ctx.save_for_backward(gradient @ weight, gradient.t() @ states)
        ctx.mark_non_differentiable(agrees)
        return loss, agrees

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states_gradient, weight_gradient = ctx.saved_tensors
        scale = gradients[0]
        return (
            states_gradient * scale.to(states_gradient.dtype),
            weight_gradient * scale.to(weight_gradient.dtype),
            None,
            None,
        )
