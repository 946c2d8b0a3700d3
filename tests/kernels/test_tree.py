from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.kernels.tree import DraftTrees, pad_trees, root_trees

#      0
#     / \
#    1   2
#   / \
#  3   4
TOKENS = [7, 1, 2, 3, 4]
PARENTS = [-1, 0, 0, 1, 1]


@given(trees=st.from_type(DraftTrees))
def test_every_tree_is_valid(trees: DraftTrees) -> None:
    """Catches a check that refuses a proper tree: any shape, ragged batches, a token repeated off its siblings."""
    trees.validate()


@pytest.mark.parametrize(
    ("node", "parent"),
    [(3, -2), (3, -1), (1, -2), (3, 3), (3, 4), (3, 5), (3, -3)],
    ids=["missing", "second root", "missing under root", "itself", "later", "beyond the row", "negative"],
)
def test_missing_parent_is_an_error(node: int, parent: int) -> None:
    """Catches a node without an earlier parent being taken for a child of the root."""
    parents = [*PARENTS[:node], parent, *PARENTS[node + 1 :]]
    with pytest.raises(ValueError, match=f"node {node} names parent {parent}, which is not an earlier node"):
        pad_trees([(TOKENS, parents)]).validate()


@pytest.mark.parametrize("parent", [0, -2, 1])
def test_node_zero_must_be_the_root(parent: int) -> None:
    """Catches a tree whose root is a child of something, which sends every ancestor walk in circles."""
    with pytest.raises(ValueError, match="node 0 must be the root"):
        pad_trees([(TOKENS, [parent, *PARENTS[1:]])]).validate()


def test_siblings_hold_distinct_tokens() -> None:
    """Catches two siblings with one token, of which the verify walk would only ever see the first."""
    with pytest.raises(ValueError, match="node 1 has two children with token 3"):
        pad_trees([([7, 1, 2, 3, 3], PARENTS)]).validate()


def test_cousins_may_share_a_token() -> None:
    """Catches token uniqueness being asked of the whole tree, its levels or its paths instead of siblings."""
    pad_trees([([7, 7, 2, 7, 2], [-1, 0, 0, 1, 2])]).validate()


@pytest.mark.parametrize("parent", [-1, 0, 1])
def test_padding_is_marked(parent: int) -> None:
    """Catches padding that passes for nodes."""
    trees = pad_trees([(TOKENS, PARENTS), ([7], [-1])])
    trees.parents[1, 3] = parent
    with pytest.raises(ValueError, match="tree 1: padding after node 0 must have parent -2"):
        trees.validate()


@pytest.mark.parametrize("count", [0, -1, 6])
def test_node_count_fits_the_arrays(count: int) -> None:
    """Catches a request without a root or with more nodes than its row holds."""
    with pytest.raises(ValueError, match=f"num_nodes is {count}, expected 1 to 5"):
        replace(pad_trees([(TOKENS, PARENTS)]), num_nodes=torch.tensor([count])).validate()


@pytest.mark.parametrize(("field", "shape"), [("tokens", (1, 4)), ("parents", (1, 6)), ("num_nodes", (2,))])
def test_arrays_describe_one_batch(field: str, shape: tuple[int, ...]) -> None:
    """Catches arrays of different batches put together."""
    with pytest.raises(ValueError, match="do not describe one batch of trees"):
        replace(pad_trees([(TOKENS, PARENTS)]), **{field: torch.ones(shape, dtype=torch.int64)}).validate()


def test_pad_trees_keeps_the_rows() -> None:
    """Catches padding in front of or inside a row, and counts that include it."""
    trees = pad_trees([([5], [-1]), (TOKENS, PARENTS)])
    trees.validate()
    assert (trees.batch_size, trees.max_nodes) == (2, 5)
    assert trees.tokens.tolist() == [[5, 0, 0, 0, 0], TOKENS]
    assert trees.parents.tolist() == [[-1, -2, -2, -2, -2], PARENTS]
    assert trees.num_nodes.tolist() == [1, 5]


def test_root_trees_are_one_node_each() -> None:
    """Catches "no speculation" being built as anything but the root alone."""
    trees = root_trees(torch.tensor([4, 9]))
    trees.validate()
    assert trees.tokens.tolist() == [[4], [9]]
    assert trees.num_nodes.tolist() == [1, 1]
