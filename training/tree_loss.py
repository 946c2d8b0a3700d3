"""A loss for heads that draft trees: the target's favourite must be among the first candidates, not the first of all.

A tree drafter proposes k children of a node, and a step goes on if the target's token is one of them. What counts is
the top-k error. Its surrogate here is the truncated top-k entropy of Lapin, Hein and Schiele, "Loss Functions for Top-k
Error: Analysis and Insights" (CVPR 2016, arXiv:1512.00486):

    log(1 + sum over j in J of exp(z_j - z_y)),    J: all other ids but the k - 1 best scored of them.

It is the cross-entropy of y after striking out its k - 1 strongest rivals, which may stay ahead of y without harm; it
vanishes as y leaves the k-th best rival behind, and its gradient, the softmax over y and J less one at y, is as big as
the cross-entropy's. k = 1 is the cross-entropy; with k no less than the number of ids it is 0.

It says nothing of the order among the first k nor of how probable they are, while a tree spends its nodes by
the product of the probabilities along a path. So it is mixed with the soft cross-entropy, which keeps the scores
probabilities.

Letters: R rows, H hidden, Vd scored ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.training.losses import SoftCrossEntropy, fused_loss, token_loss


def tree_cross_entropy(
    states: Tensor,
    weight: Tensor,
    target_probs: Tensor,
    row_weights: Tensor,
    favourites: Tensor,
    width: int,
    share: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows of (1 - `share`) `soft_cross_entropy` + `share` truncated top-k entropy.

    Args:
        favourites: the target's, columns, int64 `[R]`; where they are -1, not scored, only the former counts.
        width: k, children of a node when drafting.
        share: between 0 and 1.
        bias: see `soft_cross_entropy`; who the strongest rivals are is judged without it.

    Returns:
        As `soft_cross_entropy`.
    """
    return fused_loss(states, weight, row_weights, favourites, _TreeLoss(target_probs, favourites, width, share, bias))


@dataclass(frozen=True, slots=True)
class _TreeLoss:
    """A `RowLoss`."""

    target_probs: Tensor
    favourites: Tensor
    width: int
    share: float
    bias: Tensor | None

    def __call__(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        favourites = self.favourites[rows]
        rivals = without_strongest_rivals(scores, favourites, self.width - 1)
        if self.bias is not None:
            rivals += self.bias
        top_losses, top_gradient = token_loss(rivals, favourites)
        losses, gradient = SoftCrossEntropy(self.target_probs, self.bias)(scores, rows)
        losses = losses.lerp(top_losses, self.share)
        return losses, gradient.lerp_(top_gradient, self.share)


def without_strongest_rivals(scores: Tensor, tokens: Tensor, count: int) -> Tensor:
    """A copy of `scores [R, Vd]` with -inf at the `count` best of each row but its token, a column `[R]` or -1."""
    count = min(count, scores.shape[1] - 1)
    best = scores.topk(count + 1, dim=-1)
    is_token = best.indices == tokens[:, None]
    # The token's own place, if it is among them, falls to the next one.
    is_struck = ~is_token & (is_token.cumsum(dim=-1) + count > torch.arange(count + 1, device=scores.device))
    return scores.scatter(1, best.indices, torch.where(is_struck, -torch.inf, best.values))
