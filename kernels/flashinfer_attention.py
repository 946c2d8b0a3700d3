"""Tree attention through FlashInfer's paged prefill kernels (0.7), in two forms.

masked: one call over prefix and block, with a bit for every pair of row and key. A step writes them as bools and the
library packs them, `sum over b of N_b * (P_b + K_b)` of each.

cascade: the prefix page by page without any mask, the block slot by slot with T * K bits, and both results `(out, s)`
joined, s being the logarithm to base 2 of the sum of `2 ** logit` (Ye et al., arXiv:2501.01005, section 2.2):

    out = (2 ** s_p * out_p + 2 ** s_b * out_b) / (2 ** s_p + 2 ** s_b)

Causal rows need no mask and are one call in either form. The library plans on the host, so a plan waits for the device
once, to read lengths; running it does not. Sinks are one more state to join, with values of 0: the kernels that take
masks would silently ignore the library's own argument for them.

Letters: B requests, T rows of all of them, N rows of a request, P its prefix, K places of a block, L keys of a request.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.flashinfer_rows import (
    PagedKeys,
    block_keys,
    block_mask,
    check_full_mask,
    full_mask,
    of_busy,
    paged_keys,
)
from eyas.kernels.paged_rows import PagedRows

WORKSPACE_BYTES = 128 << 20  # what the library's documentation recommends

# The library's only kernels that take a mask; they also split a long prefix over the whole device.
_KERNELS = "fa2"


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a step.

    Args:
        mask: of the layers with a given window, bool, each request's rows after the last one's, `[sum of N L]`; None
            for a call without a mask.
        is_causal: a request's last row sees all its keys, each row before it one key less.
    """

    keys: PagedKeys
    mask: Callable[[int | None], Tensor] | None = None
    is_causal: bool = False


class _Wrappers:
    """The library's wrappers of one engine side; each holds one plan.

    A wrapper comes back once whoever had it planned is gone, and is used again only after the next wait for the device:
    until then the device may still have to read what the host wrote for the old plan.
    """

    def __init__(self, geometry: AttentionGeometry) -> None:
        import flashinfer

        self.library = flashinfer
        self.page_size = geometry.page_size
        self._geometry = geometry
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=geometry.device)
        self._free: list[Any] = []
        self._returned: list[Any] = []

    def read_lengths(self, rows: PagedRows, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`row_starts` and `lengths` on the host; waits for the device."""
        host = torch.cat([rows.row_starts, lengths]).cpu()
        self._free += self._returned
        self._returned.clear()
        return host[: rows.batch_size + 1], host[rows.batch_size + 1 :]

    def take_back_after(self, borrower: object, wrappers: list[Any]) -> None:
        """Take back what `wrappers` holds when `borrower` is gone."""
        weakref.finalize(borrower, self._returned.extend, wrappers)

    def plan(self, row_starts: Tensor, call: _Call, options: AttentionOptions) -> Any:
        """A wrapper planned for one call of a step, in layers with these options."""
        if not self._free:
            wrapper_class = self.library.BatchPrefillWithPagedKVCacheWrapper
            self._free.append(wrapper_class(self._workspace, "NHD", backend=_KERNELS))
        wrapper = self._free.pop()
        wrapper.plan(
            row_starts,
            call.keys.starts,
            call.keys.pages,
            call.keys.last_lengths,
            self._geometry.num_heads,
            self._geometry.num_kv_heads,
            self._geometry.head_dim,
            call.keys.page_size,
            # Not packed here: the library takes a packed mask's offsets, counted in bits, for bytes (its issue 2201).
            custom_mask=None if call.mask is None else call.mask(options.window),
            causal=call.is_causal,
            sm_scale=options.scale,
            window_left=options.window - 1 if call.is_causal and options.window is not None else -1,
            logits_soft_cap=options.softcap,
            q_data_type=self._geometry.dtype,
        )
        return wrapper


class PlannedFlashInfer:
    """One step's attention, see `PlannedAttention`.

    The library fixes scale, softcap and window when it plans, so the first layer of each kind plans for all of its
    kind: once per step where layers are alike.
    """

    def __init__(self, wrappers: _Wrappers, row_starts: Tensor, calls: list[_Call]) -> None:
        """Args:
        row_starts: on the host.
        calls: over different keys, their results to be joined.
        """
        self._wrappers = wrappers
        self._row_starts = row_starts
        self._num_rows = int(row_starts[-1])
        self._calls = calls
        self._kinds: dict[tuple[float | None, float | None, int | None], list[Any]] = {}
        self._borrowed: list[Any] = []
        wrappers.take_back_after(self, self._borrowed)

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._num_rows == 0:
            return out
        query, merged = query[: self._num_rows], out[: self._num_rows]
        joins = len(self._calls) > 1 or options.sinks is not None
        log_sums: Tensor | None = None
        for call, wrapper in zip(self._calls, self._planned(options), strict=True):
            pages = call.keys.view(key_cache), call.keys.view(value_cache)
            if not joins:
                wrapper.run(query, pages, out=merged)
            elif log_sums is None:
                log_sums = wrapper.run(query, pages, out=merged, return_lse=True)[1]
            else:
                self._wrappers.library.merge_state_in_place(
                    merged, log_sums, *wrapper.run(query, pages, return_lse=True)
                )
        if options.sinks is not None and log_sums is not None:
            sinks = (options.sinks.float() * math.log2(math.e)).expand_as(log_sums).contiguous()
            self._wrappers.library.merge_state_in_place(merged, log_sums, torch.zeros_like(merged), sinks)
        return out

    def _planned(self, options: AttentionOptions) -> list[Any]:
        kind = options.scale, options.softcap, options.window
        if kind not in self._kinds:
            self._kinds[kind] = [self._wrappers.plan(self._row_starts, call, options) for call in self._calls]
            self._borrowed += self._kinds[kind]
        return self._kinds[kind]


class MaskedFlashInfer:
    """`AttentionBackend` of the masked form."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self._wrappers = _Wrappers(geometry)

    @property
    def mask_encoding(self) -> MaskEncoding:
        return MaskEncoding.FULL

    def plan(self, rows: PagedRows) -> PlannedFlashInfer:
        """Raises `ValueError` for a mask that is not FULL, or that has more bits than the library can count."""
        mask = rows.mask
        if mask is None:
            return _plan_causal(self._wrappers, rows)
        lengths = of_busy(rows, rows.prefix_lengths + rows.block_lengths)
        row_starts, host_lengths = self._wrappers.read_lengths(rows, lengths)
        check_full_mask(mask, row_starts, host_lengths)
        keys = paged_keys(rows.page_table, lengths, host_lengths, self._wrappers.page_size)

        def within(window: int | None) -> Tensor:
            return full_mask(rows, mask, row_starts, host_lengths, window)

        return PlannedFlashInfer(self._wrappers, row_starts, [_Call(keys, within)])


class CascadeFlashInfer:
    """`AttentionBackend` of the cascade form."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self._wrappers = _Wrappers(geometry)

    @property
    def mask_encoding(self) -> MaskEncoding:
        return MaskEncoding.TREE_ONLY

    def plan(self, rows: PagedRows) -> PlannedFlashInfer:
        """Raises `ValueError` for a mask that is not TREE_ONLY; running it raises one for a window on masked rows."""
        mask = rows.mask
        if mask is None:
            return _plan_causal(self._wrappers, rows)
        if mask.dtype != torch.bool or mask.shape[0] != rows.batch_size or mask.shape[2] > rows.max_block:
            raise ValueError(
                f"expected a TREE_ONLY mask, bool [{rows.batch_size}, rows, at most {rows.max_block} places], "
                f"got {mask.dtype} {list(mask.shape)}"
            )
        page_size = self._wrappers.page_size
        prefixes = of_busy(rows, rows.prefix_lengths)
        row_starts, host_prefixes = self._wrappers.read_lengths(rows, prefixes)

        def within(window: int | None) -> Tensor:
            if window is not None:
                raise ValueError(
                    f"attention_backend: flashinfer-cascade cannot attend within {window} positions, which would cut "
                    "the unmasked prefix at another place in every row; use flashinfer"
                )
            return block_mask(rows, mask, int(row_starts[-1]))

        prefix = _Call(paged_keys(rows.page_table, prefixes, host_prefixes, page_size))
        block = _Call(block_keys(rows, mask.shape[2], page_size), within)
        has_prefixes = int(host_prefixes.sum()) > 0
        return PlannedFlashInfer(self._wrappers, row_starts, [block, prefix] if has_prefixes else [block])


def _plan_causal(wrappers: _Wrappers, rows: PagedRows) -> PlannedFlashInfer:
    lengths = of_busy(rows, rows.prefix_lengths + rows.row_starts.diff())
    row_starts, host_lengths = wrappers.read_lengths(rows, lengths)
    keys = paged_keys(rows.page_table, lengths, host_lengths, wrappers.page_size)
    return PlannedFlashInfer(wrappers, row_starts, [_Call(keys, is_causal=True)])
