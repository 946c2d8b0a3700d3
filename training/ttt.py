"""Training-time test (EAGLE-3): the head is trained on what it will see when it drafts, its own states.

Step 0 is a causal pass over whole conversations with target features. Step k continues every base by one more
token: its input is the head's own state from step k - 1 and the true token, its RoPE position is k further on, and its
query sees the keys of step 0 up to the base and one key from each of its own steps 1 … k. Bases never see each other's
later steps, so from step 1 on only the bases are computed.

Letters: B conversations, S longest conversation, Q most bases of a conversation, T rows, R bases, Hq / Hkv heads,
G = Hq / Hkv, D head dim, F features of a position, H width of the head's state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.models.head import DraftHead
from eyas.training.batch import Batch
from eyas.training.rounding import rounded_up

_LENGTH_STEP = 32


def training_time_test(head: DraftHead, features: Tensor, batch: Batch, num_steps: int) -> list[Tensor]:
    """The head's states at every base of every step: `num_steps` tensors `[R_k, H]`.

    Args:
        features: what the head reads of the batch's features, `[T, F]`, in the head's dtype.
    """
    attention = ChainAttention(batch)
    inputs = batch.next_ids.clamp(
        min=0
    )  # the last row of a conversation has no pair; it is no base and no base sees it
    states = head.extend(features, inputs, batch.positions, attention)
    states = states.index_select(0, batch.rows(0))
    collected = [states]
    for step in range(1, num_steps):
        rows = batch.rows(step)
        kept = [piece[:count] for piece, count in zip(
            states.split(batch.num_bases(step - 1)), batch.num_bases(step), strict=True)]  # fmt: skip
        states = torch.cat(kept)
        if rows.shape[0]:  # else all texts are too short
            attention.begin_step(step)
            token_ids = batch.token_ids.index_select(0, rows + step + 1)
            positions = batch.positions.index_select(0, rows) + step
            states = head.step(states, token_ids, positions, attention)
        collected.append(states)
    return collected


class ChainAttention:
    """The `Attention` of a training-time test, of any number of layers; call `begin_step` before each step after the
    first.

    Within a window a query of step k at base t, whose position is t + k, sees no key of step 0 at t + k - window or
    before, and of its own steps only the last `window`.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._step = 0
        self._counts = batch.lengths
        # Of each layer: step 0 [B, S, Hkv, D], then [B, Q, Hkv, D] of each step.
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        self._device = batch.token_ids.device
        self._columns = torch.arange(rounded_up(max(batch.lengths), _LENGTH_STEP), device=self._device)
        self._bases = self._columns[None]  # [1, S], then [B, Q]

    def begin_step(self, step: int) -> None:
        """The next call brings the bases of `step`."""
        self._step = step
        self._counts = self._batch.num_bases(step)
        first_bases = torch.tensor(self._batch.first_bases, device=self._device)
        self._bases = first_bases[:, None] + torch.arange(
            rounded_up(max(self._counts), _LENGTH_STEP), device=self._device
        )

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        """`query [R, Hq, D]`, `key` and `value [R, Hkv, D]` to `[R, Hq, D]`."""
        if replace(options, scale=None, window=None) != PLAIN_ATTENTION:
            raise ValueError("heads whose attention has a softcap or sinks cannot be run by training-time test")
        query, key, value = (_padded(x, self._counts) for x in (query, key, value))
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(key)
        values.append(value)
        batch, rows, num_kv_heads, head_dim = key.shape
        scale = head_dim**-0.5 if options.scale is None else options.scale
        grouped = query.view(batch, rows, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4) * scale
        attended = self._attend(grouped, keys, values, options.window)  # [B, Hkv, G, Q, D]
        attended = attended.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1, head_dim)
        return torch.cat([row[:count] for row, count in zip(attended, self._counts, strict=True)])

    def _hidden(self, window: int | None) -> Tensor:
        """Keys of step 0 that the bases' queries do not see, bool `[1 or B, 1, 1, Q, S]`."""
        bases = self._bases[:, :, None]
        hidden = self._columns > bases
        if window is not None:
            hidden = hidden | (self._columns <= bases + self._step - window)
        return hidden[:, None, None]

    def _attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None) -> Tensor:
        batch, num_kv_heads, group, rows, head_dim = query.shape
        causal_keys, causal_values = (x[0].permute(0, 2, 1, 3) for x in (keys, values))
        scores = query.flatten(2, 3) @ causal_keys.transpose(2, 3)
        scores = scores.view(batch, num_kv_heads, group, rows, -1).masked_fill(self._hidden(window), -torch.inf)
        first_own = 1 if window is None else max(1, self._step - window + 1)
        chain_keys, chain_values = (
            [x[:, :rows].permute(0, 2, 1, 3)[:, :, None] for x in stored[first_own:]] for stored in (keys, values)
        )  # [B, Hkv, 1, Q, D] each
        own = [(query * key).sum(dim=-1, keepdim=True) for key in chain_keys]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
        num_causal = scores.shape[-1]
        attended = weights[..., :num_causal].flatten(2, 3) @ causal_values
        attended = attended.view(batch, num_kv_heads, group, rows, head_dim)
        for index, value in enumerate(chain_values):
            attended = attended + weights[..., num_causal + index, None] * value
        return attended


def _padded(rows: Tensor, counts: list[int]) -> Tensor:
    """Rows of conversations end to end, `[R, ...]` to `[B, rounded longest, ...]`."""
    padded = pad_sequence(rows.split(counts), batch_first=True)
    missing = rounded_up(padded.shape[1], _LENGTH_STEP) - padded.shape[1]
    return F.pad(padded, (0, 0, 0, 0, 0, missing)) if missing else padded
