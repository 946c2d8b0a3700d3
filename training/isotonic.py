"""Isotonic regression by pooling adjacent violators (Ayer et al., Annals of Mathematical Statistics 26, 1955)."""

from __future__ import annotations


def rising(values: list[float], weights: list[float]) -> list[float]:
    """The sequence without a fall that is nearest to `values` in weighted squares.

    Args:
        weights: above 0.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            other, other_weight, other_length = blocks.pop()
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total, length = total + other_weight, length + other_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]
