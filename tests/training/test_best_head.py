from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.training.best_head import BestHead, load_weights, save_weights
from eyas.training.validation import Validation


def validation(tree_length: float, chain_length: float = 1.0) -> Validation:
    return Validation([[0.1, 0.2, 0.3, 0.4]], chain_length, tree_length)


def test_the_best_is_kept() -> None:
    """Catches a worse head that replaces the best, a chain that counts before a tree, and one of two equal heads that
    was trained less."""
    best = BestHead()
    lengths = [(1.5, 1.2), (2.0, 1.1), (2.0, 1.1), (2.0, 1.0), (1.9, 1.9), (2.0, 1.15), (2.1, 1.0)]
    kept = [best.observe(10 * i, validation(*pair)) for i, pair in enumerate(lengths)]
    assert kept == [True, True, True, False, False, True, True]
    assert best.step == best.last_step == 60
    assert best.validation == validation(2.1, 1.0)
    assert not best.should_stop


def test_patience_counts_validations_since_the_best() -> None:
    """Catches a count that is not reset by a better head, is by an equal one, or is lost on resume."""
    best = BestHead(patience=2)
    for step, tree_length in enumerate([1.5, 1.4, 1.6, 1.5]):
        best.observe(step, validation(tree_length))
    assert not best.should_stop
    resumed = BestHead(patience=2)
    resumed.load_state(best.state())
    resumed.observe(4, validation(1.6))
    assert resumed.should_stop
    assert (resumed.step, resumed.last_step, resumed.validation) == (4, 4, validation(1.6))


def test_weights_come_back_and_others_stay(tmp_path: Path) -> None:
    """Catches frozen weights that are asked of the file, and a best head that is silently not restored."""
    head, other = nn.Linear(3, 2), nn.Linear(3, 2)
    bias = other.bias.detach().clone()
    save_weights({"weight": head.weight}, tmp_path / "best.safetensors")
    load_weights(other, tmp_path / "best.safetensors")
    assert torch.equal(other.weight, head.weight)
    assert torch.equal(other.bias, bias)
    assert [file.name for file in tmp_path.iterdir()] == ["best.safetensors"]
    with pytest.raises(ValueError, match="gone"):
        load_weights(other, tmp_path / "lost.safetensors")
