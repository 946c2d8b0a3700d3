"""Medusa heads to be written as files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

HIDDEN, VOCAB_SIZE = 32, 61


def random_heads(
    num_heads: int = 3, num_layers: int = 1, rows: int | None = VOCAB_SIZE, bias: bool = True
) -> dict[str, Tensor]:
    """Random heads as their authors name them; `rows` of the projections, None for the target's.

    All numbers are exact in bfloat16, so that no format may change them.
    """
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16().float()

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = noise(HIDDEN, HIDDEN)
            if bias:
                tensors[f"{head}.{layer}.linear.bias"] = noise(HIDDEN)
        if rows is not None:
            tensors[f"{head}.{num_layers}.weight"] = noise(rows, HIDDEN)
    return tensors


@pytest.fixture(scope="session")
def medusa_tensors() -> Callable[..., dict[str, Tensor]]:
    return random_heads
