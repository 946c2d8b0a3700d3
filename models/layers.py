"""The transformer block shared by the Llama-family decoder and by EAGLE heads.

Letters: T tokens, H hidden, Hq / Hkv heads of one rank, D head dim, I MLP width of one rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.models.attention import Attention
from eyas.models.linear import Linear
from eyas.models.parallel import TensorParallel
from eyas.models.rope import rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, trainable: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trainable)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], num_rotated + self.num_kv_heads, self.head_dim)
        rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated.split([self.num_heads, self.num_kv_heads], dim=1)
            rotated = torch.cat([self.q_norm(query), self.k_norm(key)], dim=1)
        query, key = rotate(rotated, rotation).split([self.num_heads, self.num_kv_heads], dim=1)
        if self.options is PLAIN_ATTENTION:
            attended = attention(self.layer, query, key, value)
        else:
            attended = attention(self.layer, query, key, value, self.options)
        return self.parallel.sum(self.output(attended.reshape(x.shape[0], -1)))


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate x) * up x)`, gate and up fused as `[2 I, H]`, summed over ranks."""

    def __init__(self, gate_up: Linear, down: Linear, parallel: TensorParallel | None = None) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.parallel = parallel or TensorParallel()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.parallel.sum(self.down(F.silu(gate) * up))
