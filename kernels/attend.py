"""Tree attention over a slot-addressed cache: every query row sees the committed prefix and its own ancestors.

Letters: B requests, N query rows, L keys, Hq / Hkv query / key-value heads, G = Hq / Hkv, D head dim, S slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.build import MaskEncoding

MASK_ENCODING = MaskEncoding.FULL


def attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Masked attention of `query [B, N, Hq, D]` over the cached keys at `slots [B, L]`; returns `[B, N, Hq, D]`.

    Args:
        key_cache, value_cache: one layer's pool, `[S, Hkv, D]`; the rows' own keys are already written.
        slots: slot of each key, padded with any valid slot, int64 `[B, L]`.
        mask: additive mask from `additive_mask`, `[B, 1, N * G, L]` (rows of one key-value head together).
        scale: multiplies the logits; `D ** -0.5` when None.

    The query heads that share a key-value head become extra query rows, so keys are never repeated in memory.
    """
    batch, rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    num_keys = slots.shape[1]
    flat = slots.reshape(-1)
    keys = key_cache.index_select(0, flat).view(batch, num_keys, num_kv_heads, head_dim).transpose(1, 2)
    values = value_cache.index_select(0, flat).view(batch, num_keys, num_kv_heads, head_dim).transpose(1, 2)
    group = num_heads // num_kv_heads
    grouped = query.view(batch, rows, num_kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, num_kv_heads, rows * group, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    out = out.view(batch, num_kv_heads, rows, group, head_dim).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, rows, num_heads, head_dim)


def additive_mask(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Turn a FULL mask, bool `[B, N, L]`, into the form `attend` adds to its logits, `[B, 1, N * group, L]`.

    Made once per step and shared by all layers.
    """
    additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return additive.repeat_interleave(group, dim=1)[:, None]
