from __future__ import annotations

import pytest
import torch

from eyas.models.layers import GatedMLP
from eyas.models.linear import Linear, pack_linears

# One rounding of bfloat16 (8 significant bits) on either side of sums that float32 accumulates.
BFLOAT16_TOLERANCE = 2.0**-7

needs_packing = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def random_linear(inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype) -> Linear:
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    return Linear(weight.to(dtype), None if bias is None else bias.to(dtype))


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 32), (576, 960), (37, 61)])
def test_packed_equals_unpacked(shape: tuple[int, int], has_bias: bool) -> None:
    """Catches a lost bias, a transposed or padded weight, and a layout that fits only one number of rows."""
    linear = random_linear(*shape, has_bias, torch.bfloat16)
    weight, bias = linear.weight.float(), 0.0 if linear.bias is None else linear.bias.float()
    rows = torch.randn(40, shape[0], generator=torch.Generator().manual_seed(0)).bfloat16()
    linear.pack()
    assert linear.packed is not None
    assert linear.weight.numel() == 0
    with torch.inference_mode():
        for count in (1, 2, 16, 17, 40):
            expected = rows[:count].float() @ weight.T + bias
            result = linear(rows[:count])
            assert result.dtype == torch.bfloat16
            torch.testing.assert_close(result.float(), expected, rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE)


@needs_packing
def test_packed_reads_strided_rows() -> None:
    """Catches the packed product taking a slice of a wider tensor for a dense one."""
    linear = random_linear(32, 16, False, torch.bfloat16)
    wide = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = linear(wide[::2, 16:48].contiguous())
    linear.pack()
    with torch.inference_mode():
        result = linear(wide[::2, 16:48])
    torch.testing.assert_close(result, expected, rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE)


def test_float32_is_left_alone() -> None:
    """Catches exact arithmetic given up for a layout that gains nothing there."""
    linear = random_linear(64, 32, True, torch.float32)
    weight = linear.weight
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = linear(x)
    linear.pack()
    assert linear.packed is None
    assert linear.weight is weight
    assert torch.equal(linear(x), expected)


@needs_packing
def test_every_linear_of_a_model_is_packed() -> None:
    """Catches nested layers that stay slow."""
    mlp = GatedMLP(
        gate_up=random_linear(16, 64, False, torch.bfloat16), down=random_linear(32, 16, False, torch.bfloat16)
    )
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = mlp(x)
    pack_linears(mlp)
    assert mlp.gate_up.packed is not None
    assert mlp.down.packed is not None
    with torch.inference_mode():
        torch.testing.assert_close(mlp(x), expected, rtol=4 * BFLOAT16_TOLERANCE, atol=4 * BFLOAT16_TOLERANCE)
