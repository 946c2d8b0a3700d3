from __future__ import annotations

import pytest
import torch

from eyas.training.vocabulary import choose_vocabulary, count_tokens


def test_the_most_frequent_ids_are_kept_in_order_of_id() -> None:
    """Catches unsorted ids, which the published layout cannot express, and a coverage counted over ids, not tokens."""
    counts = count_tokens([torch.tensor([7, 7, 7, 1, 1, 4]), torch.tensor([4, 4, 9, 1])], vocab_size=12)
    vocabulary = choose_vocabulary(counts, size=3)
    assert vocabulary.token_ids.tolist() == [1, 4, 7]
    assert vocabulary.coverage == pytest.approx(0.9)


def test_lower_ids_win_ties() -> None:
    """Catches an unstable order, which would make two runs over one corpus disagree."""
    counts = torch.tensor([0, 2, 5, 2, 2, 0])
    assert choose_vocabulary(counts, size=3).token_ids.tolist() == [1, 2, 3]
    assert choose_vocabulary(counts, size=5).token_ids.tolist() == [0, 1, 2, 3, 4]


def test_required_ids_displace_the_rarest() -> None:
    """Catches a stop token that the head could never propose, and a vocabulary that grows by the required ids."""
    counts = torch.tensor([4, 3, 2, 1, 0, 0])
    vocabulary = choose_vocabulary(counts, size=3, required_ids=[5, 5, 0])
    assert vocabulary.token_ids.tolist() == [0, 1, 5]
    assert vocabulary.coverage == pytest.approx(0.7)


@pytest.mark.parametrize(("size", "required_ids"), [(0, []), (7, []), (1, [0, 1]), (2, [6]), (2, [-1])])
def test_impossible_requests_are_refused(size: int, required_ids: list[int]) -> None:
    """Catches a draft vocabulary larger than the target's, too small for the required ids, or with ids of no token."""
    with pytest.raises(ValueError, match="draft_vocab_size|required ids"):
        choose_vocabulary(torch.ones(6, dtype=torch.int64), size, required_ids)
