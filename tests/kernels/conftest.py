"""Random draft trees, paged slots, and the ancestor walk that the kernels are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from eyas.kernels.tree import ROOT_PARENT, DraftTrees, pad_trees

MAX_NODES = 12
VOCAB_SIZE = 16  # small, so that one token recurs under many parents


@st.composite
def tree_rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """`(tokens, parents)` of one random tree, in topological order but not always level by level."""
    tokens, parents = [draw(st.integers(0, VOCAB_SIZE - 1))], [ROOT_PARENT]
    for node in range(1, draw(st.integers(1, MAX_NODES))):
        parent = draw(st.integers(0, node - 1))
        siblings = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        tokens.append(draw(st.sampled_from(sorted(set(range(VOCAB_SIZE)) - siblings))))
        parents.append(parent)
    return tokens, parents


# `@given(trees=...)` reaches this strategy as `st.from_type(DraftTrees)`: ragged batches of one to four trees.
st.register_type_strategy(DraftTrees, st.lists(tree_rows(), min_size=1, max_size=4).map(pad_trees))


@pytest.fixture(scope="session")
def root_path() -> Callable[[DraftTrees, int, int], list[int]]:
    """Nodes from the root to `node` of tree `row`, found by walking up one parent at a time."""

    def walk(trees: DraftTrees, row: int, node: int) -> list[int]:
        parent = int(trees.parents[row, node])
        return [node] if parent == ROOT_PARENT else [*walk(trees, row, parent), node]

    return walk


@pytest.fixture(scope="session")
def paged_slots() -> Callable[[list[int], int], list[Tensor]]:
    """Slots of each request's positions, the requests' pages shuffled among each other."""

    def allocate(lengths: list[int], page_size: int) -> list[Tensor]:
        num_pages = [-(-length // page_size) for length in lengths]
        pages = list(range(sum(num_pages)))
        random.Random(page_size).shuffle(pages)
        slots = []
        for length, count in zip(lengths, num_pages, strict=True):
            own, pages = pages[:count], pages[count:]
            slots.append(torch.tensor([own[i // page_size] * page_size + i % page_size for i in range(length)]))
        return slots

    return allocate
