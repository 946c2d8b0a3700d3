from __future__ import annotations

import pytest
import torch

from eyas.training.feature_noise import with_noise

ROWS, HIDDEN, STD = 500, 32, 0.2
SCALES = torch.tensor([1.0, 30.0, 0.01])


@pytest.fixture
def features() -> torch.Tensor:
    """Three states a row, as an EAGLE-3 head fuses them, of very different size."""
    drawn = torch.randn(ROWS, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    return (drawn * SCALES[:, None]).flatten(1)


def test_noise_is_uniform_and_in_the_scale_of_each_state(features: torch.Tensor) -> None:
    """Catches noise drowned out by, or drowning, a state of another scale, and a width given for a deviation."""
    noise = (with_noise(features, HIDDEN, STD, 1) - features).unflatten(1, (3, HIDDEN))
    rms = features.unflatten(1, (3, HIDDEN)).square().mean(dim=2, keepdim=True).sqrt()
    relative = noise / rms
    torch.testing.assert_close(relative.std(dim=(0, 2)), torch.full((3,), STD), rtol=0.02, atol=0.0)
    assert float(relative.abs().max()) == pytest.approx(STD * 3**0.5, rel=0.01)
    assert float(relative.mean()) == pytest.approx(0.0, abs=0.01)


def test_noise_depends_on_every_part_of_its_key_alone(features: torch.Tensor) -> None:
    """Catches a resumed run that draws other noise, and steps, seeds or ranks that share theirs."""
    first = with_noise(features, HIDDEN, STD, 1, 2, 3)
    torch.manual_seed(5)
    assert torch.equal(first, with_noise(features, HIDDEN, STD, 1, 2, 3))
    for key in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)]:
        assert not torch.equal(first, with_noise(features, HIDDEN, STD, *key))


def test_noise_keeps_the_dtype(features: torch.Tensor) -> None:
    """Catches a float32 copy that the rest of the head cannot multiply with."""
    assert with_noise(features.bfloat16(), HIDDEN, STD, 1).dtype == torch.bfloat16
