"""A training batch: whole conversations of like length, packed end to end without padding.

Row i of a conversation pairs (target features at i, token i + 1). A *base* is a row that training drafts from. From
base t, step k of the training-time test has consumed the tokens up to t + 1 + k and is compared with the target's
distribution at row t + 1 + k, which is that of token t + 2 + k.

Letters: T rows, A fused layers, H target hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Conversations end to end.

    Args:
        token_ids: int64 `[T]`.
        is_answer: which tokens a head is trained to foretell, bool `[T]`.
        features: `[T, (A + 1) * H]`; the last H columns are the target's state before its final norm.
        lengths, prompt_lengths: per conversation.
    """

    token_ids: Tensor
    is_answer: Tensor
    features: Tensor
    lengths: list[int]
    prompt_lengths: list[int]

    def to(self, device: torch.device) -> Batch:
        """The same on a device, which goes on copying while this returns; itself where it lies there already."""
        if device == self.token_ids.device:
            return self
        tensors = (self.token_ids, self.is_answer, self.features)
        token_ids, is_answer, features = (_moved(tensor, device) for tensor in tensors)
        return Batch(token_ids, is_answer, features, self.lengths, self.prompt_lengths)

    @cached_property
    def first_bases(self) -> list[int]:
        """Per conversation, the first base, whose step 0 predicts the first answer token."""
        return [max(0, prompt_length - 2) for prompt_length in self.prompt_lengths]

    def num_bases(self, step: int) -> list[int]:
        """Per conversation, how many bases still have a row to be compared with at `step`."""
        return [max(0, length - 1 - step - first) for length, first in zip(self.lengths, self.first_bases, strict=True)]

    def rows(self, step: int) -> Tensor:
        """Flat row of every base at `step`, int64; row + 1 + step holds its token and its target's distribution."""
        pieces, offset = [], 0
        for length, first, count in zip(self.lengths, self.first_bases, self.num_bases(step), strict=True):
            pieces.append(torch.arange(offset + first, offset + first + count))
            offset += length
        return _moved(torch.cat(pieces), self.token_ids.device)

    def later_rows(self, step: int) -> Tensor:
        """Where the rows compared with at `step` stand among those of step 0, int64 `[R_step]`."""
        pieces, offset = [], 0
        for first_count, count in zip(self.num_bases(0), self.num_bases(step), strict=True):
            pieces.append(torch.arange(offset + first_count - count, offset + first_count))
            offset += first_count
        return _moved(torch.cat(pieces), self.token_ids.device)

    @cached_property
    def positions(self) -> Tensor:
        """Position of every row within its conversation, int64 `[T]`."""
        return _moved(torch.cat([torch.arange(length) for length in self.lengths]), self.token_ids.device)

    @cached_property
    def _last_rows(self) -> Tensor:
        """Where every conversation ends, int64 `[B]`."""
        return _moved(torch.tensor(self.lengths).cumsum(0) - 1, self.token_ids.device)

    @cached_property
    def next_ids(self) -> Tensor:
        """The token after every row, -1 where the conversation ends, int64 `[T]`."""
        following = torch.cat([self.token_ids[1:], self.token_ids.new_full((1,), -1)])
        following[self._last_rows] = -1
        return following

    @cached_property
    def precedes_answer(self) -> Tensor:
        """Whether the token after every row is an answer's; one cut off belongs to the same turn. Bool `[T]`."""
        following = torch.cat([self.is_answer[1:], self.is_answer[-1:]])
        following[self._last_rows] = self.is_answer[self._last_rows]
        return following


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; one copied to a GPU from pinned memory does not keep the host waiting."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
