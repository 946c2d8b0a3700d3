from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from eyas.models.eagle3 import Eagle3Head
from eyas.training.optimizer import HeadOptimizer

MUON_SHARE = 0.2  # a Muon step's root mean square is about this share of its rate, as AdamW's usually is


def step_with_random_gradients(head: Eagle3Head, optimizer: HeadOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step(max_grad_norm=1.0)


@pytest.fixture
def heads(new_eagle3: Callable[..., Eagle3Head]) -> list[Eagle3Head]:
    return [new_eagle3(torch.arange(1, 10)) for _ in range(2)]


@pytest.mark.parametrize("matrix_rate", [0.0, 0.02])
def test_every_trained_weight_moves_by_its_own_rate(heads: list[Eagle3Head], matrix_rate: float) -> None:
    """Catches weights that belong to neither optimiser, or to both, and a rate that only one of them follows."""
    head, start = heads
    optimizer = HeadOptimizer(head, rate=0.001, matrix_rate=matrix_rate, matrix_decay=0.0)
    optimizer.set_rate(0.5)
    step_with_random_gradients(head, optimizer, seed=0)
    for (name, weight), before in zip(head.named_parameters(), start.parameters(), strict=True):
        is_matrix = weight.ndim == 2 and name != "output.weight"
        rate = MUON_SHARE * matrix_rate if is_matrix and matrix_rate else 0.001
        moved = float((weight - before).detach().square().mean().sqrt())
        expected = 0.0 if name == "embedding" else 0.5 * rate
        assert moved == pytest.approx(expected, rel=0.35), name


def test_merged_projections_are_orthogonalised_apart(heads: list[Eagle3Head]) -> None:
    """Catches rows of query, key and value, or of gate and up, cut at the wrong places, or taken for one matrix."""
    head, start = heads
    step_with_random_gradients(head, HeadOptimizer(head, 0.001, 0.02, 0.0), seed=0)
    for moved, before, rows in (
        (head.attention.qkv.weight, start.attention.qkv.weight, [32, 16, 16]),
        (head.mlp.gate_up.weight, start.mlp.gate_up.weight, [48, 48]),
    ):
        for matrix in (moved - before).detach().split(rows):
            values = torch.linalg.svdvals(matrix)
            assert values.min() > 0.5 * values.max()


def test_state_goes_on_exactly(heads: list[Eagle3Head]) -> None:
    """Catches momentum of either optimiser that is lost on resume."""
    head, resumed = heads
    optimizer = HeadOptimizer(head, 0.001, 0.02, 0.1)
    step_with_random_gradients(head, optimizer, seed=0)
    other = HeadOptimizer(resumed, 0.001, 0.02, 0.1)
    other.load_state(copy.deepcopy(optimizer.state()))
    resumed.load_state_dict(head.state_dict())
    step_with_random_gradients(head, optimizer, seed=1)
    step_with_random_gradients(resumed, other, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), resumed.parameters(), strict=True))
