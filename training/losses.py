"""Soft cross-entropy against the target's distribution, fused with the output projection.

For logits z = s W^T + b and target probabilities p, the loss of a row is -sum(p * log_softmax(z)), its gradient towards
z softmax(z) - p. Both come out of one pass over blocks of rows small enough for the cache; the logits of a whole
batch never exist, nor does their gradient unless the projection is trained.

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
    states: Tensor, weight: Tensor, target_probs: Tensor, row_weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of the cross-entropy of `softmax(states weight^T + bias)` against `target_probs`.

    Args:
        states: normed states `[R, H]`.
        weight: output projection `[Vd, H]`.
        target_probs: `[R, Vd]`, rows sum to 1.
        row_weights: `[R]`; 0 drops a row.
        bias: `[Vd]`, not trained.

    Returns:
        The loss, a scalar, and where the two distributions have their maximum in common, bool `[R]`.
    """
    loss, agrees = _SoftCrossEntropy.apply(states, weight, target_probs, row_weights, bias)
    return loss, agrees


class _SoftCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients too: they need the same softmax."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target_probs: Tensor, row_weights: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        states_gradient = torch.empty_like(states) if needs_states else None
        # One product over all rows is twice as fast for the weight, but its logits' gradient must be kept.
        kept = target_probs.new_empty(target_probs.shape, dtype=states.dtype) if needs_weight else None
        agrees = torch.empty(states.shape[0], dtype=torch.bool, device=states.device)
        loss = torch.zeros((), dtype=wide, device=states.device)
        for first in range(0, states.shape[0], _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            scores = F.linear(states[rows], weight, bias).to(wide)
            probs, weights = target_probs[rows].to(wide), row_weights[rows].to(wide)
            best = probs.max(dim=-1).indices[:, None]
            highest = scores.amax(dim=-1, keepdim=True)
            agrees[rows] = (scores.gather(1, best) >= highest).squeeze(1)
            expected = torch.linalg.vecdot(probs, scores)
            exponentials = scores.sub_(highest).exp_()
            totals = exponentials.sum(dim=-1, keepdim=True)
            log_totals = (highest + totals.log()).squeeze(1)
            loss += torch.dot(log_totals * probs.sum(dim=-1) - expected, weights)
            if states_gradient is None and kept is None:
                continue
            gradient = exponentials.div_(totals).sub_(probs).mul_(weights[:, None]).to(states.dtype)
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
