from __future__ import annotations

import torch
from torch import Tensor

from eyas.training.prior_samples import PathSamples
from eyas.training.tree_outcome import expected_lengths


def raw(log_probs: Tensor, level: int) -> Tensor:
    return log_probs


def samples_of(
    probabilities: list[list[list[float]]], accepted: list[list[int]], counted: list[list[int]] | None = None
) -> PathSamples:
    log_probs = torch.tensor(probabilities).log()
    paths = torch.tensor(accepted)
    is_counted = torch.ones_like(paths, dtype=torch.bool) if counted is None else torch.tensor(counted).bool()
    return PathSamples(log_probs, paths, is_counted, torch.arange(paths.shape[0]))


def test_a_path_is_as_long_as_the_nodes_that_the_budget_keeps() -> None:
    """Catches a path counted past the nodes kept, past a miss, and siblings kept in another order than by score."""
    samples = samples_of([[[0.6, 0.3], [0.7, 0.2]]], [[0, 1]])
    # By score: a 0.6, aa 0.42, b 0.3, ba 0.21, ab 0.12, bb 0.06; the text is ab.
    assert expected_lengths(samples, raw, [1, 2, 3, 4, 5, 6, 7], 2, 2) == [1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert expected_lengths(samples, raw, [9], 1, 2) == [2.0]
    missed = samples_of([[[0.6, 0.3], [0.7, 0.2]]], [[-1, 0]])
    assert expected_lengths(missed, raw, [7], 2, 2) == [1.0]


def test_other_scores_make_other_trees() -> None:
    """Catches scores that are not asked for, or asked for the wrong level."""
    samples = samples_of([[[0.6, 0.3], [0.7, 0.2]]], [[0, 0]])
    seen: list[tuple[int, list[int]]] = []

    def shallow(log_probs: Tensor, level: int) -> Tensor:
        seen.append((level, list(log_probs.shape)))
        return log_probs if level == 1 else log_probs - 5.0

    assert expected_lengths(samples, raw, [3], 2, 2) == [3.0]
    assert expected_lengths(samples, shallow, [3], 2, 2) == [2.0]
    assert seen == [(1, [1, 1, 2]), (2, [1, 2, 2])]


def test_nodes_off_the_path_have_the_candidates_of_others() -> None:
    """Catches rivals that are as sure of themselves as the path is, or as unsure."""
    sure, unsure = [[0.5, 0.4], [0.9, 0.05]], [[0.5, 0.4], [0.5, 0.05]]
    samples = samples_of([sure, unsure], [[1, 0], [1, 0]])
    # On the first text's path b, ba scores 0.36, and its rival aa 0.25: four nodes are root, a, b, ba.
    # On the second's, ba scores 0.2, and aa 0.45.
    assert expected_lengths(samples, raw, [4], 2, 2) == [1.0 + 1.0 + 0.5]


def test_texts_that_go_another_way_leave_the_count() -> None:
    """Catches a text's end of the target's path taken for a miss, which would make deep nodes look worthless."""
    certain = [[[0.9], [0.9]]] * 4
    accepted = [[0, 0], [0, -1], [0, 0], [-1, 0]]
    counted = [[1, 1], [1, 1], [1, 0], [1, 0]]
    # Three of four first tokens are accepted; of the two that can be followed further, one is.
    assert expected_lengths(samples_of(certain, accepted, counted), raw, [3], 1, 2) == [1.0 + 0.75 + 0.375]


def test_bases_too_near_the_end_of_a_text_are_left_out() -> None:
    """Catches levels that do not exist counted as misses; without any base nothing is drafted."""
    samples = samples_of([[[0.9], [0.0]], [[0.9], [0.9]]], [[-1, -1], [0, 0]])
    assert expected_lengths(samples, raw, [3], 1, 2) == [3.0]
    assert expected_lengths(samples.of(torch.tensor([True, False])), raw, [3, 4], 1, 2) == [1.0, 1.0]
