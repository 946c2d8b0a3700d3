"""Fixed trees by name: Cartesian products, shapes that were published, and files of rank paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.kernels.static_tree import TreeChoices

_CARTESIAN = "cartesian:"

# The sparse tree that Medusa (arXiv:2401.10774) ships for its 7B models, FasterDecoding/Medusa,
# medusa/model/medusa_choices.py, mc_sim_7b_63: how many of its best candidates each node has as children.
_MEDUSA_63: dict[tuple[int, ...], int] = {
    (): 10,
    (0,): 10,
    (1,): 7,
    (2,): 3,
    (3,): 2,
    **{(rank,): 1 for rank in range(4, 10)},
    (0, 0): 10,
    (0, 1): 3,
    (0, 2): 2,
    **{(0, rank): 1 for rank in range(3, 8)},
    (1, 0): 2,
    (2, 0): 1,
    (0, 0, 0): 2,
}

NAMED_TREES = {
    "medusa-63": TreeChoices.of(
        (*parent, rank) for parent, num_children in _MEDUSA_63.items() for rank in range(num_children)
    )
}


def named_tree(text: str) -> TreeChoices:
    """The shape that a setting names: `cartesian:4,2,2`, one of `NAMED_TREES`, or a `.json` file of rank paths.

    A named tree counts its nodes without the root, as its authors do.

    Raises:
        ValueError: if it is none of these, or the file or the widths describe no tree.
    """
    if text in NAMED_TREES:
        return NAMED_TREES[text]
    if text.startswith(_CARTESIAN):
        widths = text.removeprefix(_CARTESIAN).split(",")
        if not all(width.isascii() and width.isdigit() for width in widths):
            raise ValueError(f"tree: {text} must list the width of every level, like {_CARTESIAN}4,2,2")
        return TreeChoices.cartesian([int(width) for width in widths])
    if text.endswith(".json"):
        return _read_tree(Path(text))
    raise ValueError(
        f"tree: {text} is unknown; use dynamic, {_CARTESIAN}4,2,2, {', '.join(NAMED_TREES)}, or a .json file of rank "
        "paths like [[0], [1], [0, 0]]"
    )


def _read_tree(path: Path) -> TreeChoices:
    try:
        paths: Any = json.loads(path.read_text())
    except OSError:
        raise ValueError(f"tree: {path} cannot be read") from None
    except ValueError as error:
        raise ValueError(f"tree: {path} is not valid JSON: {error}") from None
    if not isinstance(paths, list) or not all(isinstance(ranks, list) for ranks in paths):
        raise ValueError(f"tree: {path} must hold a list of rank paths like [[0], [1], [0, 0]]")
    return TreeChoices.of(paths)
