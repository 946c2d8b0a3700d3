"""The transformer block shared by the Llama-family decoder and by EAGLE heads.

The residual stream travels as a pair `(residual, update)`: what the last block adds to it is added by the next norm,
which passes over the stream anyway.

Letters: T tokens, H hidden, Hq / Hkv heads of one rank, D head dim, I MLP width of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.fused import REFERENCE, FusedOperations
from eyas.models.attention import Attention, rotate_and_attend
from eyas.models.linear import Linear
from eyas.models.parallel import TensorParallel


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, trainable: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trainable)
        self.eps = eps
        self.operations = REFERENCE

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.add_rms_norm(x, None, self.weight, self.eps)[0]

    def add(self, residual: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """`residual + update` normed, and that sum itself, `[T, H]` each."""
        return self.operations.add_rms_norm(residual, update, self.weight, self.eps)


def summed(residual: Tensor, update: Tensor | None) -> Tensor:
    """The residual stream where it is needed as it is, not normed."""
    return residual if update is None else residual + update


class SelfAttention(nn.Module):
    """Fused query-key-value projection, rotation, cached attention, output projection (summed over ranks).

    Args:
        qkv: `[(Hq + 2 Hkv) D, in]`, query rows first; `in` is H, or 2H in an EAGLE-3 head.
        q_norm, k_norm: per-head norms over D, or None.
        options: how its attention departs from the plain one.
    """

    def __init__(
        self,
        layer: int,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        parallel: TensorParallel | None = None,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.options = options
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.parallel = parallel or TensorParallel()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """`x [T, in]` to `[T, H]`."""
        qkv = self.qkv(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            qkv = torch.cat([self.q_norm(query), self.k_norm(key), value], dim=1)
        attended = rotate_and_attend(attention, self.layer, qkv, rotation, self.num_heads, self.options)
        return self.parallel.sum(self.output(attended.reshape(x.shape[0], -1)))


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate x) * up x)`, gate and up fused as `[2 I, H]`, summed over ranks."""

    def __init__(self, gate_up: Linear, down: Linear, parallel: TensorParallel | None = None) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.parallel = parallel or TensorParallel()
        self.operations = REFERENCE

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.sum(self.down(self.operations.silu_gate(self.gate_up(x))))


def use_operations(model: nn.Module, operations: FusedOperations) -> None:
    """Give every norm and gated MLP of a model, target or head, one backend's functions.

    Rotation belongs to whoever runs the model, see `RotatingAttention`. Modules from `transformers` keep their own.
    """
    for module in model.modules():
        if isinstance(module, RMSNorm | GatedMLP):
            module.operations = operations
