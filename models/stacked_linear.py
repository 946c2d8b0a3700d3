"""Linear layers of equal shape side by side, as one batched product.

Letters: K layers, n of them in use, T rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.models.linear import Linear


class StackedLinear(Linear):
    """K layers: weight `[K, out, in]`, bias `[K, out]` or None.

    Packed, they run one after another: on CPU in bfloat16 that takes half the time of the batched product, which
    cannot read the packed layout.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, trainable: bool = False) -> None:
        super().__init__(weight, bias, trainable)
        self._packed_layers: list[Linear] = []  # a plain list, lest they be packed a second time

    def pack(self) -> None:
        """See `Linear.pack`."""
        layers = [
            Linear(weight, None if self.bias is None else self.bias[index]) for index, weight in enumerate(self.weight)
        ]
        for layer in layers:
            layer.pack()
        if all(layer.packed is not None for layer in layers):
            self._packed_layers = layers
            self.weight = layers[0].weight  # empty

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """`x [n, T, in]` through layers `first` … `first + n - 1`, to `[n, T, out]`."""
        used = slice(first, first + x.shape[0])
        if self._packed_layers:
            return torch.stack([layer(rows) for layer, rows in zip(self._packed_layers[used], x, strict=True)])
        if self.bias is None:
            return torch.bmm(x, self.weight[used].mT)
        return torch.baddbmm(self.bias[used, None], x, self.weight[used].mT)
