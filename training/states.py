"""The target's states at texts that are already there, in one causal pass: what a recorder would have kept of them.

Letters: T tokens, A fused layers, H target hidden, Hq / Hkv heads, D head dim.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.models.config import DecoderConfig
from eyas.models.decoder import Decoder
from eyas.training.packing import in_groups

_PASS_TOKENS = 2048  # longer passes bring nothing, their logits of attention need room


def recorded_layers(config: DecoderConfig) -> tuple[int, ...]:
    """What a corpus keeps: the states EAGLE-3 fuses, and the last one, which gives the target's distribution."""
    return (*config.default_aux_layers(), config.num_layers)


class TargetStates:
    """Computes the states of packed conversations; each of them has those it would have alone.

    Args:
        model: the target, on one rank.
        capture: residual-stream indices, see `Decoder`; of a corpus, `recorded_layers`.
    """

    def __init__(self, model: Decoder, capture: tuple[int, ...]) -> None:
        if model.parallel.size != 1:
            raise ValueError("states of texts are computed on one rank, but the target is split over several")
        self._model = model
        self._capture = capture

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, lengths: list[int]) -> Tensor:
        """States `[T, (A + 1) * H]` of conversations end to end, on the target's device and in its dtype.

        Args:
            token_ids: int64 `[T]`.
            lengths: of every conversation, T in all.
        """
        if sum(lengths) != token_ids.shape[0] or min(lengths) < 1:
            raise ValueError(f"lengths: {sum(lengths)} tokens in all, but token_ids holds {token_ids.shape[0]}")
        token_ids = token_ids.to(self._model.device)
        groups = in_groups(lengths, int, _PASS_TOKENS)
        pieces = [
            self._states(piece, group)
            for piece, group in zip(token_ids.split([sum(group) for group in groups]), groups, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _states(self, token_ids: Tensor, lengths: list[int]) -> Tensor:
        positions = torch.cat([torch.arange(length, device=token_ids.device) for length in lengths])
        attention = PackedAttention(self._model, lengths)
        features = self._model(token_ids, positions, attention, self._capture).features
        if features is None:
            raise ValueError("capture: is empty")
        return features


class PackedAttention:
    """The `Attention` of conversations end to end that are seen whole, so that no cache is kept.

    The rows' own keys stand for a paged cache with pages of one slot. Windows, softcaps and sinks are therefore those
    of serving.
    """

    def __init__(self, model: Decoder, lengths: list[int]) -> None:
        config, device, longest = model.config, model.device, max(lengths)
        geometry = AttentionGeometry(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_head_dim=config.value_head_dim,
            page_size=1,
            dtype=model.dtype,
            device=device,
        )
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        last_slot = sum(lengths) - 1
        pages = starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=device)
        self._attend = ReferenceAttention(geometry).plan(
            PagedRows(
                row_starts=starts,
                prefix_lengths=torch.zeros(len(lengths), dtype=torch.int32, device=device),
                block_lengths=starts.diff(),
                page_table=pages.clamp(max=last_slot),
                mask=None,
                max_rows=longest,
                max_block=longest,
                max_prefix=0,
            )
        )

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        """`query [T, Hq, D]`, `key` and `value [T, Hkv, D]` to `[T, Hq, D]`."""
        return self._attend(query, key, value, options)
