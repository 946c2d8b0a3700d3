"""A linear layer that can keep its weight packed in the CPU matmul library's own layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PACKING_ROWS_HINT = 16


class Linear(nn.Module):
    """`y = x W^T + b` for `x [T, in]`.

    On CPU in bfloat16 a decode step is bound by reading weights; `pack` reorders the weight once for oneDNN, which
    then reads it about half as slowly again as the plain layout makes it (benchmarks/linear_layout.py).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, trainable: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trainable)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=trainable)
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Pack for inference where it pays (bfloat16 on CPU with oneDNN); elsewhere do nothing."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKING_ROWS_HINT)
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        packed_linear: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return packed_linear


def pack_linears(model: nn.Module) -> None:
    """Pack every `Linear` of a model for inference."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
