"""The part of FlashInfer 0.7.2 that Eyas calls, in plain torch, for machines without it.

Written from the library's documentation, and strict where it is: what it forbids, or reads as garbage without a word,
is an error here. Masks go through packed bytes as they do there. `install` puts this module in the library's place.

Letters: B requests, T rows, N rows of a request, L keys of a request, Hq / Hkv heads, D head dim, H hidden.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


def install() -> None:
    """Stand in for the library in this process, unless it is here itself and has a device."""
    if importlib.util.find_spec("flashinfer") is None or not torch.cuda.is_available():
        sys.modules["flashinfer"] = sys.modules[__name__]


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Each segment of bools packed by itself, so that it begins at a whole byte; and the segments' first bytes."""
    _expect(
        x.dtype == torch.bool and x.dim() == 1 and len(x) == int(indptr[-1]), "x must be flat bools up to indptr[-1]"
    )
    order = torch.arange(8) if bitorder == "little" else torch.arange(8).flip(0)
    packed = []
    for start, end in zip(indptr.tolist(), indptr[1:].tolist(), strict=False):
        bits = F.pad(x[start:end], (0, -(end - start) % 8)).view(-1, 8).int()
        packed.append((bits << order.to(x.device)).sum(dim=1).to(torch.uint8))
    starts = torch.tensor([0] + [len(part) for part in packed], dtype=torch.int32).cumsum(0).int()
    return torch.cat(packed), starts.to(x.device)


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of ragged rows over paged keys and values; `plan`, then `run` for each layer."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        _expect(float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD", "an NHD pool and a byte workspace")
        self.device = float_workspace_buffer.device
        self._backend = backend
        self._plan: SimpleNamespace | None = None

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None, causal: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = "float16",
    ) -> None:  # fmt: skip
        batch = len(qo_indptr) - 1
        _expect(batch >= 1, "the planner divides by the number of requests")
        for name, indptr in (("qo_indptr", qo_indptr), ("paged_kv_indptr", paged_kv_indptr)):
            _expect(indptr.dtype == torch.int32 and indptr.shape == (batch + 1,), f"{name} must be int32 [{batch + 1}]")
            _expect(int(indptr[0]) == 0 and bool((indptr.diff() >= 0).all()), f"{name} must rise from 0")
        _expect(int(qo_indptr[-1]) > 0, "there must be rows: nothing would be launched")
        indices = paged_kv_indices
        _expect(indices.dtype == torch.int32 and indices.device == self.device, "indices must be int32 on the device")
        _expect(indices.shape == (int(paged_kv_indptr[-1]),), "indices must end at paged_kv_indptr[-1]")
        last = paged_kv_last_page_len
        _expect(last.dtype == torch.int32 and last.shape == (batch,), "last page lengths must be int32 [B]")
        pages, last = paged_kv_indptr.diff().cpu(), last.cpu()
        _expect(bool(((last >= 1) & (last <= page_size) | (pages == 0) & (last == 0)).all()), "last pages hold a key")
        _expect(num_qo_heads % num_kv_heads == 0, "query heads must be a multiple of key-value heads")
        # Not checked there: other head dims read beyond their tiles (its issue 4299).
        _expect(head_dim_qk in (64, 128, 256), f"heads of {head_dim_qk}")
        _expect(q_data_type in HALF_TYPES, f"there are no kernels for {q_data_type}")
        _expect(packed_custom_mask is None, "packed masks' offsets are counted in bits, read as bytes (its 2201)")
        lengths = (pages - 1).clamp(min=0) * page_size + last
        rows = qo_indptr.diff().cpu()
        mask = mask_starts = None
        if custom_mask is not None:
            _expect(self._backend == "fa2", "only the fa2 kernels take masks; a wrapper on auto may have chosen others")
            _expect(bool(((pages > 0) | (rows == 0)).all()), "mask offsets run backwards over requests without pages")
            bit_starts = F.pad((rows * lengths).cumsum(0), (1, 0)).int()
            _expect(custom_mask.shape == (int(bit_starts[-1]),), f"the mask must have {int(bit_starts[-1])} elements")
            mask, mask_starts = segment_packbits(custom_mask, bit_starts, "little")
        self._plan = SimpleNamespace(
            row_starts=qo_indptr.tolist(), page_starts=paged_kv_indptr.tolist(), pages=indices.clone(),
            lengths=lengths.tolist(), heads=(num_qo_heads, num_kv_heads, head_dim_qk), page_size=page_size,
            mask=mask, mask_starts=mask_starts, causal=causal, window_left=window_left,
            scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale, softcap=logits_soft_cap or 0.0,
            dtype=q_data_type,
        )  # fmt: skip

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None, return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Output `[T, Hq, D]`, and on demand the logarithm to base 2 of the sum of 2 ** logit, float32 `[T, Hq]`."""
        plan = self._plan
        _expect(plan is not None, "plan before run")
        assert plan is not None
        _expect(sinks is None, "the fa2 kernels ignore sinks")
        num_heads, num_kv_heads, head_dim = plan.heads
        shape = (plan.row_starts[-1], num_heads, head_dim)
        _expect(q.shape == shape and q.dtype == plan.dtype, f"q must be {plan.dtype} {list(shape)}")
        for cache in paged_kv_cache:
            _expect(cache.shape[1:] == (plan.page_size, num_kv_heads, head_dim), "pages must be [_, page, Hkv, D]")
            _expect(cache.dtype == plan.dtype and cache.stride(-1) == 1, "pages must have the planned type")
        out = torch.zeros(shape, dtype=plan.dtype, device=q.device) if out is None else out
        _expect(out.shape == shape and out.dtype == plan.dtype, "out must be like q")
        _expect(out.is_contiguous() and q.stride(-1) == 1, "out must be contiguous, q within a head")
        lse = torch.empty(shape[:2], device=q.device)
        for request, (start, end) in enumerate(zip(plan.row_starts, plan.row_starts[1:], strict=False)):
            out[start:end], lse[start:end] = self._attend(plan, request, q[start:end], *paged_kv_cache)
        return (out, lse) if return_lse else out

    @staticmethod
    def _attend(plan: SimpleNamespace, request: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, num_kv_heads, _ = plan.heads
        count, length = len(q), plan.lengths[request]
        pages = plan.pages[plan.page_starts[request] : plan.page_starts[request + 1]]
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache in (k, v)
        )
        logits = torch.einsum("nhd,lhd->hnl", q.float(), keys) * plan.scale
        if plan.softcap > 0:
            logits = plan.softcap * torch.tanh(logits / plan.softcap)
        rows = torch.arange(count, device=q.device)[:, None]
        columns = torch.arange(length, device=q.device)
        visible = torch.ones(count, length, dtype=torch.bool, device=q.device)
        if plan.mask is not None:
            bits = rows * length + columns
            visible = (plan.mask[plan.mask_starts[request] + bits // 8] >> (bits % 8).to(torch.uint8) & 1).bool()
        elif plan.causal:
            visible = columns <= rows + length - count
        if plan.window_left >= 0:
            visible = visible & (columns + count + plan.window_left >= length + rows)
        logits = (logits * 1.4426950408889634).masked_fill(~visible, -torch.inf)
        top = logits.amax(dim=-1, keepdim=True) if length else logits.new_full((num_heads, count, 1), -torch.inf)
        weights = torch.where(visible, torch.exp2(logits - top), 0.0)
        total = weights.sum(dim=-1, keepdim=True)
        # Weights of 0 still meet the values of hidden keys, as in the tensor cores.
        out = torch.einsum("hnl,lhd->nhd", weights, values) / total.clamp(min=1e-37).squeeze(-1).T[..., None]
        return out.to(q.dtype), (top + total.log2()).squeeze(-1).T


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """`v [T, Hq, D]` becomes the attention over both sets of keys, `s [T, Hq]` its log-sum-exp to base 2."""
    for value, log_sum in ((v, s), (v_other, s_other)):
        _expect(value.is_contiguous() and log_sum.is_contiguous(), "states must be contiguous")
        _expect(value.shape == v.shape and log_sum.shape == v.shape[:2], "states must have one shape")
        _expect(value.dtype == v.dtype in HALF_TYPES and log_sum.dtype == torch.float32, "s must be float32, v not")
    top = torch.maximum(s, s_other)
    mine, others = (torch.exp2(log_sum - top).nan_to_num(0.0) for log_sum in (s, s_other))
    total = mine + others
    share = torch.where(total > 0, mine / total, 0.0)[..., None]
    other_share = torch.where(total > 0, others / total, 0.0)[..., None]
    v.copy_(share * v.float() + other_share * v_other.float())
    s.copy_(top + total.log2())


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    _expect(input.dim() in (2, 3) and weight.shape == input.shape[-1:], "rows [T, H] or [T, Hq, D], one weight")
    _expect(input.dtype == weight.dtype in HALF_TYPES and input.stride(-1) == 1, "one half type, packed rows")
    wide = input.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(input.dtype)


def silu_and_mul(input: Tensor) -> Tensor:
    _expect(input.shape[-1] % 2 == 0 and input.dtype in HALF_TYPES and input.is_contiguous(), "even rows, of half type")
    gate, up = input.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    """Zero below the threshold at which the probabilities not below it sum to `top_p [T]`, the others renormalised."""
    _expect(probs.dtype == torch.float32 and probs.dim() == 2, "float32 rows")
    _expect(bool(((top_p > 0) & (top_p < 1)).all()), "top_p in (0, 1)")
    kept = torch.zeros_like(probs)
    for row, (own, limit) in enumerate(zip(probs, top_p.tolist(), strict=True)):
        for threshold in own.unique().flip(0):
            kept[row] = torch.where(own >= threshold, own, 0.0)
            if float(kept[row].double().sum()) >= limit:
                break
    return kept / kept.sum(dim=-1, keepdim=True)


sampling = SimpleNamespace(top_p_renorm_probs=top_p_renorm_probs)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"flashinfer: {what}")
