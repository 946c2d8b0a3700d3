"""Attention over one text without pages, written out head by head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


class TextAttention:
    """Causal attention of one text that grows from call to call; each layer keeps all of its keys and values."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.keys:
            key, value = torch.cat([self.keys[layer], key]), torch.cat([self.values[layer], value])
        self.keys[layer], self.values[layer] = key, value
        num_rows, num_heads, head_dim = query.shape
        is_visible = torch.ones(num_rows, key.shape[0], dtype=torch.bool).tril(key.shape[0] - num_rows)
        group = num_heads // key.shape[1]
        heads = []
        for head in range(num_heads):
            scores = query[:, head] @ key[:, head // group].T / head_dim**0.5
            heads.append(scores.masked_fill(~is_visible, -torch.inf).softmax(-1) @ value[:, head // group])
        return torch.stack(heads, dim=1)


@pytest.fixture(scope="session")
def text_attention() -> Callable[[], TextAttention]:
    """Makes the attention of a new text."""
    return TextAttention
