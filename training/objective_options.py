"""What a head is trained to do, and on which rows."""

from __future__ import annotations

from dataclasses import dataclass

OBJECTIVES = ("distill", "hard", "tree")
LOSS_ROWS = ("answers", "all")


@dataclass(frozen=True, slots=True)
class ObjectiveOptions:
    """Args:
    name: distill compares with the target's distribution, hard with the token the text holds next; tree mixes the
        former with a loss on the target's favourite being among the first `tree_width` candidates.
    tree_share: of that loss, see `tree_cross_entropy`.
    loss_rows: answers, or all rows of a conversation: the target's distribution is as true in a prompt.
    feature_noise: see `with_noise`; what the head is compared with has none.
    """

    name: str = "distill"
    tree_width: int = 4
    tree_share: float = 0.5
    loss_rows: str = "answers"
    feature_noise: float = 0.0
    seed: int = 0


DISTILL = ObjectiveOptions()
