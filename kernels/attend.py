"""Tree attention over a slot-addressed cache: every query row sees the committed prefix and its own ancestors.

Plain softmax goes to `scaled_dot_product_attention`; with a softcap or sinks it is written out, softmax in float32.

Letters: B requests, N query rows, L keys, Hq / Hkv query / key-value heads, G = Hq / Hkv, D head dim, Dv head dim of
the values, S slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.build import MaskEncoding

MASK_ENCODING = MaskEncoding.FULL


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Masked attention of `query [B, N, Hq, D]` over the cached keys at `slots [B, L]`; returns `[B, N, Hq, Dv]`.

    Args:
        key_cache, value_cache: one layer's pool, `[S, Hkv, D]` and `[S, Hkv, Dv]`; the rows' own keys are already
            written.
        slots: slot of each key, padded with any valid slot, int64 `[B, L]`.
        mask: additive mask from `additive_mask`, `[B, 1, N * G, L]` (rows of one key-value head together).
        scale: multiplies the logits; `D ** -0.5` when None.
        softcap: bounds the scaled logits, `softcap * tanh(logits / softcap)`.
        sinks: one more logit per query head, `[Hq]`, that takes its share of the softmax and has no value.

    The query heads that share a key-value head become extra query rows, so keys are never repeated in memory.
    """
    batch, rows, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = value_cache.shape[1:]
    num_keys = slots.shape[1]
    flat = slots.reshape(-1)
    keys = key_cache.index_select(0, flat).view(batch, num_keys, num_kv_heads, head_dim).transpose(1, 2)
    values = value_cache.index_select(0, flat).view(batch, num_keys, num_kv_heads, value_dim).transpose(1, 2)
    group = num_heads // num_kv_heads
    grouped = query.view(batch, rows, num_kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, num_kv_heads, rows * group, head_dim)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    else:
        logits = (grouped @ keys.transpose(2, 3)).float() * (head_dim**-0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        row_sinks = None if sinks is None else sinks.float().view(num_kv_heads, 1, group).expand(-1, rows, -1)
        weights = _softmax(logits + mask, None if row_sinks is None else row_sinks.reshape(1, num_kv_heads, -1, 1))
        out = weights.to(values.dtype) @ values
    out = out.view(batch, num_kv_heads, rows, group, value_dim).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, rows, num_heads, value_dim)


def additive_mask(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Turn a FULL mask, bool `[B, N, L]`, into the form `attend` adds to its logits, `[B, 1, N * group, L]`.

    Made once per step and shared by all layers.
    """
    additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return additive.repeat_interleave(group, dim=1)[:, None]


def windowed_mask(mask: Tensor, window: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """An additive mask `[B, 1, N * G, L]` that also hides what lies `window` or more positions before its row.

    Positions are those of the text: a node stands at committed length + depth wherever its slot is, so siblings see
    equally far back, and a window may cut off a node's own first ancestors.

    Args:
        query_positions: `[B, N]`.
        key_positions: `[B, L]`; padding may have any.
    """
    is_far = key_positions[:, None, :] <= query_positions[:, :, None] - window
    group = mask.shape[2] // query_positions.shape[1]
    return mask.masked_fill(is_far.repeat_interleave(group, dim=1)[:, None], -torch.inf)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of `[B, Hkv, R, L]`, shared with the rows' sinks `[1, Hkv, R, 1]` if any."""
    if sinks is None:
        return logits.softmax(dim=-1)
    with_sinks = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    return with_sinks.softmax(dim=-1)[..., :-1]
