"""Two optimisers in one: Muon for the matrices inside the head, AdamW for output projections, norms and biases.

Muon moves a matrix by an orthogonalised step, of equal size in every direction. In the few thousand steps a small
corpus allows, that learns more than AdamW alone. An output projection is a table of rows for separate tokens, which
gains nothing from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.models.layers import GatedMLP, SelfAttention


class HeadOptimizer:
    """Args:
    rate: of AdamW, at `set_rate(1.0)`.
    matrix_rate: of Muon, scaled so that a step is of the size AdamW's would be at this rate; 0 leaves all to AdamW.
    matrix_decay: weight decay of the matrices; the others have none.
    """

    def __init__(self, head: nn.Module, rate: float, matrix_rate: float, matrix_decay: float) -> None:
        trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
        is_matrix = {
            name: matrix_rate > 0 and weight.ndim > 1 and name.endswith("weight") and name != "output.weight"
            for name, weight in trained.items()
        }
        others = [weight for name, weight in trained.items() if not is_matrix[name]]
        self._weights = list(trained.values())
        self._stacks = [weight for name, weight in trained.items() if is_matrix[name]]
        # Muon takes single matrices; those of a stack or of a merged projection share its memory.
        self._rows = _merged_rows(head)
        self._slices = [self._matrices(weight, weight.detach()) for weight in self._stacks]
        matrices = [matrix for slices in self._slices for matrix in slices]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        ]
        self._rates = [rate]
        if matrices:
            muon = torch.optim.Muon(matrices, matrix_rate, weight_decay=matrix_decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
            self._rates.append(matrix_rate)

    def set_rate(self, share: float) -> None:
        """Let the next steps use this share of the rates."""
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share

    def step(self, max_grad_norm: float) -> None:
        """Move the weights along their gradients, clipped to a norm all together, and forget the gradients."""
        torch.nn.utils.clip_grad_norm_(self._weights, max_grad_norm)
        for weight, slices in zip(self._stacks, self._slices, strict=True):
            if weight.grad is not None:
                for matrix, gradient in zip(slices, self._matrices(weight, weight.grad), strict=True):
                    matrix.grad = gradient
        for optimizer in self._optimizers:
            optimizer.step()
        for weight in self._weights:
            weight.grad = None

    def _matrices(self, weight: nn.Parameter, values: Tensor) -> list[Tensor]:
        """Views of `values`, of a weight's shape, one for each matrix the weight holds."""
        rows = self._rows.get(weight, [weight.shape[-2]])
        return [matrix for stacked in values.view(-1, *weight.shape[-2:]) for matrix in stacked.split(rows)]

    def state(self) -> list[dict[str, Any]]:
        """All that `load_state` needs to go on exactly."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Restore what `state` gave."""
        for optimizer, part in zip(self._optimizers, state, strict=True):
            optimizer.load_state_dict(part)


def _merged_rows(head: nn.Module) -> dict[nn.Parameter, list[int]]:
    """Rows of each projection in a weight that holds several, which are orthogonalised apart: they are apart in all but
    the product, and it is less work."""
    rows: dict[nn.Parameter, list[int]] = {}
    for module in head.modules():
        if isinstance(module, SelfAttention):
            heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
            rows[module.qkv.weight] = [count * module.head_dim for count in heads]
        elif isinstance(module, GatedMLP):
            rows[module.gate_up.weight] = [module.gate_up.weight.shape[0] // 2] * 2
    return rows
