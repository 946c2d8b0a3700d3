from __future__ import annotations

import math
from typing import Any

import pytest

from eyas.training.training_config import TrainingConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": None, "max_minutes": math.inf}, "max_minutes: must be a number above 0, got inf"),
        ({"learning_rate": math.inf}, "learning_rate: must be a number above 0"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes: must be a number above 0"),
        ({"draft_vocab_size": 3}, "draft_vocab_size: must be at least 4"),
        (
            {"objective": "tree", "tree_width": 64, "draft_vocab_size": 64},
            "tree_width: must be below the 64 ids",
        ),
        ({"seed": 2**32}, "seed: must be between 0"),
        ({"seed": -1}, "seed: must be between 0"),
    ],
)
def test_settings_no_run_can_have_are_refused(settings: dict[str, Any], message: str) -> None:
    """Catches what would end in an overflow or an empty list of candidates after the corpus was recorded."""
    with pytest.raises(ValueError, match=message):
        TrainingConfig("eagle3", **{"num_steps": 1, **settings})


def test_few_ids_are_enough_where_all_can_be_proposed() -> None:
    """Catches the limit of an EAGLE-3 head, which proposes the ids of its loss only, set for other kinds."""
    assert TrainingConfig("medusa", num_steps=1, draft_vocab_size=1).draft_vocab_size == 1
