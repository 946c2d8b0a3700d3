"""Noise on what a head reads, against its leaning on the last digits of features it will have to guess itself.

Letters: T rows, A states a position fuses, H target hidden.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PRIME = 1_000_003
_MODULUS = 2**63 - 1


def with_noise(features: Tensor, hidden_size: int, std: float, *key: int) -> Tensor:
    """`features [T, A * H]` with uniform noise, as EAGLE-1 adds (arXiv:2401.15077).

    Args:
        std: of the noise, as a share of the root mean square of each of a row's A states: these differ in scale.
        key: what the noise depends on, besides the shape and the device.
    """
    seed = 0
    for part in key:
        seed = (seed * _PRIME + part) % _MODULUS
    generator = torch.Generator(features.device).manual_seed(seed)
    states = features.reshape(features.shape[0], -1, hidden_size)
    drawn = torch.rand(states.shape, generator=generator, device=features.device, dtype=torch.float32)
    scale = states.float().square().mean(dim=-1, keepdim=True).sqrt() * (std * math.sqrt(12.0))
    return (states + ((drawn - 0.5) * scale).to(states.dtype)).reshape(features.shape)
