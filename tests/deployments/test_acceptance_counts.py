"""Figures of hand-made trees and runs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.deployments.acceptance_counts import AcceptanceCounts
from eyas.deployments.offline import OfflineOutput, acceptance_length
from eyas.deployments.step_observer import Edge, ObservedStep

#        root
#     10      20          ranks 1 and 3
#   11  12    11          ranks 1 and 2, rank 1
#       13                rank 1
TREE = ([9, 10, 20, 11, 12, 11, 13], [-1, 0, 0, 1, 1, 2, 4])
EDGES = [
    Edge(1, 0.6, 0.61), Edge(3, 0.1, 0.55), Edge(1, 0.5, 0.51), Edge(2, 0.3, 0.51), Edge(1, 0.7, 0.71),
    Edge(1, 0.95, 0.25),
]  # fmt: skip


def step_of(*run: int) -> ObservedStep:
    return ObservedStep(*TREE, EDGES, list(run))


def counted(*steps: tuple[ObservedStep, int]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for step, num_kept in steps:
        counts.add(step, num_kept)
    return counts


def output_of(num_steps: int, num_step_tokens: int) -> OfflineOutput:
    return OfflineOutput(0, [0] * (num_step_tokens + 1), num_steps, num_step_tokens)


def test_depths_and_ranks_of_one_step() -> None:
    """Catches children of a rejected node counted as rejected, and ranks counted among the nodes chosen."""
    counts = counted((step_of(10, 12, 99), 3))
    assert counts.proposed == {1: 1, 2: 1, 3: 1}
    assert +counts.accepted == {1: 1, 2: 1}
    assert counts.rank_proposed == {(1, 1): 1, (1, 3): 1, (2, 1): 1, (2, 2): 1, (3, 1): 1}
    assert +counts.rank_accepted == {(1, 1): 1, (2, 2): 1}
    assert (counts.num_steps, counts.num_tokens, counts.num_cut, counts.num_accepted) == (1, 3, 0, 2)
    raw, used = (
        {(each.low, each.num_edges, each.num_accepted) for each in curve.buckets if each.num_edges}
        for curve in (counts.raw, counts.used)
    )
    assert used == {(0.6, 1, 1), (0.5, 3, 1), (0.2, 1, 0)}
    assert raw == {
        (0.6, 1, 1), (0.1, 1, 0), (0.5, 1, 0), (0.3, 1, 1), (0.9, 1, 0),
    }  # fmt: skip


def test_a_token_is_looked_for_among_its_siblings_only() -> None:
    """Catches the 11 under one node taken for the 11 under the other, which had another rank and probability."""
    counts = counted((step_of(20, 11, 99), 3))
    assert +counts.rank_accepted == {(1, 3): 1, (2, 1): 1}
    assert counts.rank_proposed == {(1, 1): 1, (1, 3): 1, (2, 1): 1}
    assert counts.proposed == {1: 1, 2: 1}  # nothing was proposed below


def test_nothing_accepted() -> None:
    """Catches a rejected step that counts for depths it never came to."""
    counts = counted((step_of(99), 1))
    assert (counts.proposed, +counts.accepted) == ({1: 1}, Counter())
    assert (counts.num_accepted, counts.acceptance_length) == (0, 1.0)


@pytest.mark.parametrize(
    ("num_kept", "proposed", "num_cut"), [(4, {1: 1, 2: 1, 3: 1}, 0), (3, {1: 1, 2: 1, 3: 1}, 1), (1, {1: 1}, 1)]
)
def test_a_text_that_ends_within_accepted_tokens(num_kept: int, proposed: dict[int, int], num_cut: int) -> None:
    """Catches drafts past the end of a text counted, and the last token it kept counted as rejected."""
    counts = counted((step_of(10, 12, 13, 99), num_kept))
    assert counts.proposed == proposed
    assert counts.accepted == proposed if num_kept < 4 else {1: 1, 2: 1, 3: 1}
    assert (counts.num_cut, counts.num_tokens) == (num_cut, num_kept)
    assert counts.num_accepted == counts.num_tokens - (counts.num_steps - counts.num_cut)


def test_steps_without_a_draft() -> None:
    """Catches plain steps left out of the acceptance length, or a depth of 0 proposed by them."""
    counts = counted((ObservedStep([9], [-1], [], [1]), 1), (step_of(10, 99), 2))
    assert (counts.num_steps, counts.acceptance_length, counts.proposed[1]) == (2, 1.5, 1)


def test_an_answer_is_cut_where_its_text_ends() -> None:
    """Catches the kept tokens dealt out to the wrong steps; the first token of an answer is in no step."""
    counts = AcceptanceCounts()
    counts.add_text([step_of(10, 99), step_of(10, 12, 99), step_of(20, 11, 99)], output_of(3, 6))
    assert (counts.num_steps, counts.num_tokens, counts.num_cut) == (3, 6, 1)
    assert counts.acceptance_length == output_of(3, 6).acceptance_length == 2.0
    assert counts.rank_accepted[2, 1] == 0


def test_an_answer_of_one_token_was_never_drafted_for() -> None:
    """Catches a request without a verify step dividing by zero or counting as a step."""
    counts = AcceptanceCounts()
    counts.add_text([], output_of(0, 0))
    assert (counts.num_steps, counts.acceptance_length, counts.raw.expected_error) == (0, 0.0, None)


def test_steps_of_another_answer_are_refused() -> None:
    """Catches steps mixed up between requests, which every figure would hide."""
    with pytest.raises(ValueError, match="2 steps were observed of an answer made in 1"):
        AcceptanceCounts().add_text([step_of(99), step_of(99)], output_of(1, 1))
    with pytest.raises(ValueError, match="lack 2 tokens"):
        AcceptanceCounts().add_text([step_of(99)], output_of(1, 3))


@st.composite
def observed_texts(draw: st.DrawFn, is_chain: bool = False) -> tuple[list[ObservedStep], OfflineOutput]:
    """Steps over random trees, whose runs go down a path and then leave the tree; the last is cut anywhere."""
    steps = []
    for _ in range(draw(st.integers(0, 5))):
        num_nodes = draw(st.integers(1, 9))
        parents = [-1] + [node - 1 if is_chain else draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
        siblings = Counter[int]()
        edges = []
        for parent in parents[1:]:
            siblings[parent] += 1
            edges.append(Edge(siblings[parent], draw(st.floats(0, 1)), 0.5))
        tokens = list(range(100, 100 + num_nodes))
        node, run = 0, []
        while children := [child for child, parent in enumerate(parents) if parent == node]:
            if not draw(st.booleans()):
                break
            node = draw(st.sampled_from(children))
            run.append(tokens[node])
        steps.append(ObservedStep(tokens, parents, edges, [*run, 7]))
    num_tokens = sum(len(step.run) for step in steps)
    if steps:
        num_tokens -= draw(st.integers(0, len(steps[-1].run) - 1))
    return steps, output_of(len(steps), num_tokens)


@given(st.lists(observed_texts(), max_size=4))
def test_accepted_tokens_add_up(texts: list[tuple[list[ObservedStep], OfflineOutput]]) -> None:
    """Catches a token counted at two depths or at none, and an acceptance length of its own."""
    counts = AcceptanceCounts()
    for steps, output in texts:
        counts.add_text(steps, output)
    num_tokens = sum(output.num_step_tokens for _, output in texts)
    num_steps = sum(output.num_steps for _, output in texts)
    assert counts.num_accepted == num_tokens - (num_steps - counts.num_cut)
    assert counts.rank_accepted.total() == counts.num_accepted == sum(each.num_accepted for each in counts.raw.buckets)
    assert counts.rank_proposed.total() == counts.raw.num_edges
    assert counts.acceptance_length == acceptance_length(output for _, output in texts)
    for depth, count in counts.accepted.items():
        assert count <= counts.proposed[depth] <= (counts.accepted[depth - 1] if depth > 1 else num_steps)


@given(st.lists(observed_texts(is_chain=True), max_size=4))
def test_a_chain_has_first_ranks_only(texts: list[tuple[list[ObservedStep], OfflineOutput]]) -> None:
    """Catches depth taken for rank: the ranks of a chain say what its depths say."""
    counts = AcceptanceCounts()
    for steps, output in texts:
        counts.add_text(steps, output)
    assert {rank for _, rank in counts.rank_proposed} <= {1}
    assert {depth: count for (depth, _), count in counts.rank_proposed.items()} == counts.proposed
    assert {depth: count for (depth, _), count in (+counts.rank_accepted).items()} == +counts.accepted
