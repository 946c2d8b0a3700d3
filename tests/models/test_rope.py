from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eyas.kernels.fused import rotate
from eyas.models.rope import RotaryTable

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
}


def test_rotation_by_hand() -> None:
    """Catches interleaved instead of half-split pairs, a wrong sign, and heads or rows that get another's angle."""
    table = RotaryTable(CONFIG, context_length=64)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = [5, 0, 63]
    rotated = rotate(x, table.lookup(torch.tensor(positions), torch.float32))
    for row, position in enumerate(positions):
        for pair in range(4):
            angle = position / 100.0 ** (2 * pair / 8)
            first, second = x[row, :, pair], x[row, :, pair + 4]
            expected = first * math.cos(angle) - second * math.sin(angle)
            torch.testing.assert_close(rotated[row, :, pair], expected, rtol=1e-5, atol=1e-5)
            expected = second * math.cos(angle) + first * math.sin(angle)
            torch.testing.assert_close(rotated[row, :, pair + 4], expected, rtol=1e-5, atol=1e-5)


def test_table_reaches_past_the_context() -> None:
    """Catches a table sized by the checkpoint's own context, or too short for nodes drafted at the context's end."""
    table = RotaryTable(CONFIG, context_length=300)
    cos, sin = table.lookup(torch.tensor([299, 299 + 64]), torch.bfloat16)
    assert cos.shape == sin.shape == (2, 1, 8)
    assert cos.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_dependent_scaling_is_refused(rope_type: str, name: str) -> None:
    """Catches cached keys rotated by frequencies that later rows no longer use."""
    factors = [1.0] * 4
    scaling = {name: rope_type, "factor": 2.0, "short_factor": factors, "long_factor": factors}
    scaling |= {"original_max_position_embeddings": 32}
    with pytest.raises(ValueError, match=rf"rope_type: {rope_type} is not supported; use default, linear"):
        RotaryTable(CONFIG | {"rope_scaling": scaling}, context_length=64)
