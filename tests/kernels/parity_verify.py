"""Accepted paths: `kernels.verify` against `kernels.triton_verify`."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from parity import DEVICE, ParityCase
from torch import Tensor

from eyas.kernels import triton_verify, verify
from eyas.kernels.build import TreeLinks, tree_links
from eyas.kernels.tree import DraftTrees, pad_trees

Row = tuple[list[int], list[int]]  # tokens and parents of one request's nodes


def chain(num_nodes: int) -> Row:
    return list(range(num_nodes)), list(range(-1, num_nodes - 1))


def star(num_nodes: int) -> Row:
    return list(range(num_nodes)), [-1] + [0] * (num_nodes - 1)


def random_tree(num_nodes: int, seed: int) -> Row:
    """Tokens recur under different parents; siblings' differ."""
    rng = random.Random(seed)
    tokens, parents = [0], [-1]
    for node in range(1, num_nodes):
        parents.append(rng.randrange(max(0, node - 7), node))
        tokens.append(parents[1:].count(parents[-1]))
    return tokens, parents


def on_device(rows: list[Row]) -> tuple[DraftTrees, TreeLinks]:
    trees = pad_trees(rows)
    trees = DraftTrees(trees.tokens.to(DEVICE), trees.parents.to(DEVICE), trees.num_nodes.to(DEVICE))
    return trees, tree_links(trees)


def compare(trees: DraftTrees, links: TreeLinks, target_tokens: Tensor, draft_depth: int) -> Tensor:
    """Both walks must agree; returns how many tokens were accepted."""
    target_tokens = target_tokens.to(DEVICE)
    expected = verify.verify_walk(trees, links, target_tokens, draft_depth)
    accepted = triton_verify.verify_walk(trees, links, target_tokens, draft_depth)
    assert torch.equal(accepted.path, expected.path)
    assert torch.equal(accepted.num_accepted, expected.num_accepted)
    assert torch.equal(accepted.bonus_tokens, expected.bonus_tokens)
    return accepted.num_accepted


def likely_targets(trees: DraftTrees, seed: int) -> Tensor:
    """At most nodes the token of one of their children, else a token that none has."""
    rng = random.Random(seed)
    targets = torch.full_like(trees.tokens, 10**6)
    for row in range(trees.batch_size):
        for node in range(int(trees.num_nodes[row])):
            children = (trees.parents[row] == node).nonzero().flatten().tolist()
            if children and rng.random() < 0.9:
                targets[row, node] = trees.tokens[row, rng.choice(children)]
    return targets


def one_node() -> None:
    """Catches a step without speculation that emits nothing."""
    trees, links = on_device([([5], [-1]), ([6], [-1])])
    for draft_depth in (0, 3):
        compare(trees, links, torch.tensor([[8], [9]]), draft_depth)


def width_one() -> None:
    """Catches a chain accepted past its first wrong token, or not up to it."""
    trees, links = on_device([chain(6)] * 6)
    targets = torch.tensor([[node + 1 if node != last else 0 for node in range(6)] for last in range(6)])
    assert compare(trees, links, targets, draft_depth=5).tolist() == [0, 1, 2, 3, 4, 5]


def depth_one() -> None:
    """Catches a scan that stops before the last sibling, or goes on from one star to its padding."""
    trees, links = on_device([star(40), star(40), star(3)])
    targets = torch.tensor([[39] * 40, [1] * 40, [0] * 40])
    assert compare(trees, links, targets, draft_depth=1).tolist() == [1, 1, 0]


def branches() -> None:
    """Catches a token matched among all nodes, or cousins, instead of the children of the current node."""
    rows = [random_tree(num_nodes, seed) for seed, num_nodes in enumerate((12, 20, 33, 7))]
    trees, links = on_device(rows)
    for seed in range(3):
        compare(trees, links, likely_targets(trees, seed), draft_depth=9)


def paths_longer_than_the_depth() -> None:
    """Catches a walk bounded by the node count, which writes past the path's end."""
    trees, links = on_device([chain(10), random_tree(10, 1)])
    for draft_depth in (0, 1, 4):
        compare(trees, links, likely_targets(trees, 0), draft_depth)


def depth_beyond_the_nodes() -> None:
    """Catches node arrays indexed by depth."""
    trees, links = on_device([chain(3), star(3)])
    compare(trees, links, likely_targets(trees, 0), draft_depth=12)


def nodes_64_and_more() -> None:
    """Catches node numbers that some narrow type wraps."""
    trees, links = on_device([chain(64), chain(200), random_tree(130, 2)])
    compare(trees, links, likely_targets(trees, 0), draft_depth=199)


def padding_full_of_stale_links() -> None:
    """Catches a walk into what an earlier, larger batch left behind, and a padding request that accepts."""
    trees, links = on_device([chain(5), chain(3), chain(5), star(5)])
    num_nodes = torch.tensor([5, 3, 0, 2], device=DEVICE)
    stale = TreeLinks(links.first_child.clone(), links.next_sibling.clone())
    stale.first_child[1, 2], stale.next_sibling[1, 3:] = 3, 4
    trees = DraftTrees(trees.tokens, trees.parents, num_nodes)
    targets = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 0, 0, 0], [1, 2, 3, 4, 5], [2, 0, 0, 0, 0]])
    assert compare(trees, stale, targets, draft_depth=4).tolist() == [4, 2, 0, 0]


def links_in_circles() -> None:
    """Catches a scan of siblings without a bound, which would hang the device."""
    trees, links = on_device([star(4), star(4)])
    links.next_sibling[0, 3] = 1
    links.next_sibling[1, 2] = 2
    compare(trees, links, torch.tensor([[9, 9, 9, 9], [2, 9, 9, 9]]), draft_depth=3)


def empty_batch() -> None:
    """Catches a launch of no programs, which CUDA refuses."""
    empty = torch.empty(0, 4, dtype=torch.int64, device=DEVICE)
    trees = DraftTrees(empty, empty, torch.empty(0, dtype=torch.int64, device=DEVICE))
    compare(trees, TreeLinks(empty, empty), empty, draft_depth=2)


REGIMES: list[Callable[[], None]] = [
    one_node,
    width_one,
    depth_one,
    branches,
    paths_longer_than_the_depth,
    depth_beyond_the_nodes,
    nodes_64_and_more,
    padding_full_of_stale_links,
    links_in_circles,
    empty_batch,
]
CASES = [ParityCase("verify", "triton", regime.__name__, regime) for regime in REGIMES]
