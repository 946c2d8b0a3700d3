"""The two factors of a candidate projection while they are trained.

Letters: R rows, H hidden, r rank, Vd scored vocabulary, m candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.training.losses import soft_cross_entropy

_BLOCK_ROWS = 512  # of the full scores exist at a time
_SMALLEST = 1e-7  # singular value, as a share of the greatest, that is told from zero


class CandidateFactors(nn.Module):
    """Float32 factors of an output projection, computed with in another dtype.

    Args:
        down: `[r, H]`.
        up: `[Vd, r]`.
    """

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    @staticmethod
    def of(output: Tensor, rank: int) -> CandidateFactors:
        """The best ones in the mean square (Eckart, Young): the truncated SVD of `output [Vd, H]`, evenly split.

        Raises:
            ValueError: for a rank that is not between 1 and H - 1, or that exceeds Vd.
        """
        check_rank(output, rank)
        wide = output.detach().double()
        squares, directions = torch.linalg.eigh(wide.t() @ wide)  # of the SVD, only the side of H is needed
        kept = directions[:, -rank:].flip(1)  # [H, r], the greatest first
        singular = squares[-rank:].flip(0).clamp(min=0).sqrt()
        roots = singular.clamp(min=_SMALLEST * float(singular[0])).sqrt()
        return CandidateFactors((kept * roots).t().float().contiguous(), (wide @ (kept / roots)).float())

    def divergence(
        self, states: Tensor, output: Tensor, row_weights: Tensor, num_candidates: int
    ) -> tuple[Tensor, Tensor]:
        """Forward Kullback-Leibler divergence of the factors' softmax from the full projection's.

        Args:
            states: what both read, `[R, H]`, in the dtype to compute in; not trained.
            output: the full projection, `[Vd, H]`; not trained.
            row_weights: `[R]`; 0 drops a row from the sum.
            num_candidates: m.

        Returns:
            The weighted sum over rows, a float32 scalar, and where the full projection's first token is among the m
            candidates as drafting takes them at temperature 0, bool `[R]`.
        """
        down, up = self.down.to(states.dtype), self.up.to(states.dtype)
        total, recalled = torch.zeros((), device=states.device), []
        for rows, weights in zip(states.split(_BLOCK_ROWS), row_weights.float().split(_BLOCK_ROWS), strict=True):
            with torch.no_grad():
                log_probs = F.linear(rows, output).float().log_softmax(dim=-1)
                probs = log_probs.exp()
                negative_entropy = torch.linalg.vecdot(probs, log_probs) @ weights
                best = log_probs.argmax(dim=-1, keepdim=True)
                found = F.linear(F.linear(rows, down), up).topk(num_candidates, dim=-1).indices
                recalled.append((found == best).any(dim=-1))
            cross_entropy, _ = soft_cross_entropy(F.linear(rows, down), up, probs, weights)
            total = total + cross_entropy + negative_entropy
        return total, torch.cat(recalled)


def check_rank(output: Tensor, rank: int) -> None:
    """Raise `ValueError` for a rank that factors of `output [Vd, H]` cannot have or that could save nothing."""
    num_rows, hidden_size = output.shape
    highest = min(hidden_size - 1, num_rows)
    if not 1 <= rank <= highest:
        raise ValueError(
            f"rank: must be from 1 to {highest} for a projection of {num_rows} x {hidden_size}, got {rank}"
        )
