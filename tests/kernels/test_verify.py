from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.kernels.build import tree_links
from eyas.kernels.grow import TreeGrowth
from eyas.kernels.tree import DraftTrees, pad_trees, root_trees
from eyas.kernels.verify import AcceptedPaths, verify_walk


def walk(trees: DraftTrees, target_tokens: list[list[int]], draft_depth: int) -> AcceptedPaths:
    return verify_walk(trees, tree_links(trees), torch.tensor(target_tokens), draft_depth)


def walk_by_hand(trees: DraftTrees, row: int, target_tokens: list[int], draft_depth: int) -> list[int]:
    """Accepted nodes of one request, root first."""
    edges = list(zip(trees.parents[row].tolist(), trees.tokens[row].tolist(), strict=True))
    path = [0]
    while len(path) <= draft_depth and (path[-1], target_tokens[path[-1]]) in edges:
        path.append(edges.index((path[-1], target_tokens[path[-1]])))
    return path


@given(trees=st.from_type(DraftTrees), draft_depth=st.integers(0, 15), rng=st.randoms(use_true_random=False))
def test_walk_equals_the_walk_by_hand(trees: DraftTrees, draft_depth: int, rng: random.Random) -> None:
    """Catches a wrong turn at any node, rows that disturb each other, and path arrays sized or indexed by N."""
    target_tokens = []
    for row in range(trees.batch_size):
        tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
        targets = []
        for node in range(trees.max_nodes):
            children = [token for token, parent in zip(tokens, parents, strict=True) if parent == node]
            targets.append(rng.choice(children) if children and rng.random() < 0.8 else rng.randrange(16))
        target_tokens.append(targets)
    accepted = walk(trees, target_tokens, draft_depth)
    assert accepted.path.shape == (trees.batch_size, draft_depth + 1)
    for row, targets in enumerate(target_tokens):
        path = walk_by_hand(trees, row, targets, draft_depth)
        assert accepted.path[row].tolist() == path + [-1] * (draft_depth + 1 - len(path))
        assert int(accepted.num_accepted[row]) == len(path) - 1
        assert int(accepted.bonus_tokens[row]) == targets[path[-1]]
        assert accepted.emitted_tokens(trees, row) == [targets[node] for node in path]


# Node 4 continues node 2; its token is also node 3's, under another parent.
#      0 (7)
#     /  |
#  1 (5) 2 (6)
#    |     |
#  3 (9) 4 (9)
BRANCHED = ([7, 5, 6, 9, 9], [-1, 0, 0, 1, 2])


@pytest.mark.parametrize(
    ("target_tokens", "path", "emitted"),
    [
        ([6, 9, 9, 1, 2], [0, 2, 4], [6, 9, 2]),
        ([5, 9, 9, 1, 2], [0, 1, 3], [5, 9, 1]),
        ([5, 8, 9, 1, 2], [0, 1, -1], [5, 8]),
        ([9, 9, 9, 9, 9], [0, -1, -1], [9]),
        ([0, 0, 0, 0, 0], [0, -1, -1], [0]),
    ],
    ids=["last sibling", "first sibling", "stops below", "grandchild is no child", "padding's token"],
)
def test_walk_of_a_branched_tree(target_tokens: list[int], path: list[int], emitted: list[int]) -> None:
    """Catches tokens matched against the whole tree instead of the children of the current node."""
    trees = pad_trees([BRANCHED, (list(range(6)), list(range(-1, 5)))])
    accepted = walk(trees, [[*target_tokens, 0], [1, 2, 3, 4, 5, 6]], draft_depth=2)
    assert accepted.path[0].tolist() == path
    assert accepted.emitted_tokens(trees, 0) == emitted
    assert accepted.emitted_tokens(trees, 1) == [1, 2, 3]


@pytest.mark.parametrize("num_accepted", range(6))
def test_walk_of_a_chain(num_accepted: int) -> None:
    """Catches a width-1 tree accepted past its first wrong token, or not up to it."""
    trees = pad_trees([(list(range(6)), list(range(-1, 5)))])
    target_tokens = [node + 1 if node != num_accepted else 0 for node in range(6)]
    accepted = walk(trees, [target_tokens], draft_depth=5)
    assert int(accepted.num_accepted) == num_accepted
    assert accepted.emitted_tokens(trees, 0) == [*range(1, num_accepted + 1), target_tokens[num_accepted]]


@pytest.mark.parametrize("draft_depth", [0, 4])
def test_root_alone_emits_the_bonus(draft_depth: int) -> None:
    """Catches a step without speculation that emits nothing, or indexes nodes by the draft depth."""
    trees = root_trees(torch.tensor([3, 4]))
    accepted = walk(trees, [[8], [9]], draft_depth)
    assert accepted.num_accepted.tolist() == [0, 0]
    assert accepted.path.tolist() == [[0] + [-1] * draft_depth] * 2
    assert [accepted.emitted_tokens(trees, row) for row in range(2)] == [[8], [9]]


def test_padding_request_accepts_nothing() -> None:
    """Catches a request without nodes that walks into what a larger batch left in its row."""
    trees = pad_trees([BRANCHED, BRANCHED])
    padding = DraftTrees(trees.tokens, trees.parents, torch.tensor([5, 0]))
    accepted = verify_walk(padding, tree_links(trees), torch.tensor([[6, 9, 9, 1, 2]] * 2), draft_depth=2)
    assert accepted.path.tolist() == [[0, 2, 4], [0, -1, -1]]
    assert accepted.num_accepted.tolist() == [2, 0]


def test_links_in_circles_end_the_scan() -> None:
    """Catches a walk that never ends because siblings lead round to each other."""
    trees = pad_trees([BRANCHED])
    links = tree_links(trees)
    links.next_sibling[0, 2] = 1
    accepted = verify_walk(trees, links, torch.tensor([[3, 0, 0, 0, 0]]), draft_depth=2)
    assert accepted.path.tolist() == [[0, -1, -1]]


class RandomModel:
    """Next-token log-probabilities that depend on the whole text, of a target and of a head that errs by `error`."""

    vocab_size = 6

    def __init__(self, seed: int, error: float) -> None:
        self.seed = seed
        self.error = error

    def target(self, text: list[int]) -> Tensor:
        return self._logits(text, 0).log_softmax(-1)

    def head(self, text: list[int]) -> Tensor:
        return (self._logits(text, 0) + self.error * self._logits(text, 1)).log_softmax(-1)

    def greedy(self, text: list[int]) -> int:
        return int(self.target(text).argmax())

    def _logits(self, text: list[int], stream: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, stream, *text)) % 2**63)
        return 3.0 * torch.randn(self.vocab_size, generator=generator)


def draft(model: RandomModel, texts: list[list[int]], width: int, depth: int, num_nodes: list[int]) -> DraftTrees:
    """Grow one tree per text from the head."""
    growth = TreeGrowth(width)
    best = torch.stack([model.head(text) for text in texts]).topk(width)
    frontier = growth.start(best.indices, best.values)
    paths = [[[token] for token in tokens] for tokens in frontier.tokens.tolist()]
    for _ in range(depth - 1):
        log_probs = [[model.head(text + path) for path in row] for text, row in zip(texts, paths, strict=True)]
        best = torch.stack([torch.stack(row) for row in log_probs]).topk(width)
        frontier = growth.expand(best.indices, best.values)
        ranks, tokens = frontier.parent_ranks.tolist(), frontier.tokens.tolist()
        paths = [
            [[*paths[row][rank], token] for rank, token in zip(ranks[row], tokens[row], strict=True)]
            for row in range(len(texts))
        ]
    return growth.finish(torch.tensor([text[-1] for text in texts]), torch.tensor(num_nodes))


def verify(model: RandomModel, texts: list[list[int]], trees: DraftTrees, depth: int) -> AcceptedPaths:
    """Let the greedy target choose after every node, then walk."""
    target_tokens = torch.zeros_like(trees.tokens)
    for row, text in enumerate(texts):
        paths: list[list[int]] = [text]
        for node in range(1, int(trees.num_nodes[row])):
            paths.append([*paths[int(trees.parents[row, node])], int(trees.tokens[row, node])])
        target_tokens[row, : len(paths)] = torch.tensor([model.greedy(path) for path in paths])
    return verify_walk(trees, tree_links(trees), target_tokens, depth)


@given(
    seed=st.integers(0, 2**32),
    error=st.sampled_from([0.0, 0.5, 5.0]),
    width=st.integers(1, 3),
    depth=st.integers(1, 4),
    num_nodes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
def test_speculation_writes_the_greedy_text(
    seed: int, error: float, width: int, depth: int, num_nodes: list[int]
) -> None:
    """Catches any fault of growth, links or walk that changes the text a greedy target writes."""
    model = RandomModel(seed, error)
    texts = [[row] for row in range(len(num_nodes))]
    for _ in range(4):
        trees = draft(model, texts, width, depth, num_nodes)
        trees.validate()
        accepted = verify(model, texts, trees, depth)
        for row, text in enumerate(texts):
            emitted = accepted.emitted_tokens(trees, row)
            assert 1 <= len(emitted) <= min(depth + 1, num_nodes[row])
            for token in emitted:
                assert token == model.greedy(text)
                text.append(token)


@given(seed=st.integers(0, 2**32), depth=st.integers(1, 5))
def test_a_perfect_head_is_accepted_in_full(seed: int, depth: int) -> None:
    """Catches a walk or a growth that gives up early, which losslessness alone would forgive."""
    model = RandomModel(seed, error=0.0)
    texts = [[0], [1]]
    trees = draft(model, texts, width=1, depth=depth, num_nodes=[depth + 1, depth])
    accepted = verify(model, texts, trees, depth)
    assert accepted.num_accepted.tolist() == [depth, depth - 1]
