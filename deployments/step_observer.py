"""Watching every verify step of an engine in this process: the tree, each edge's scores, and the tokens it brought.

What crosses to the target is a tree without probabilities. Here the growth is offered its candidates through a
recorder, and each node of the finished tree is found again among them by its path of tokens: siblings hold distinct
tokens, so a path names one candidate even where scores are tied. Values are read from the device only after the step's
times are taken.

Letters: B requests, E nodes of a level to be extended, W candidates per parent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.grow import Frontier
from eyas.workers.draft import DraftRunner
from eyas.workers.local import LocalWorkers
from eyas.workers.messages import AcceptedRun, StepPlan, StepResult
from eyas.workers.rankers import Rankers
from eyas.workers.tree_drafting import DraftInputs, Growth, TreeDrafting

Path = tuple[int, ...]
Tree = tuple[list[int], list[int]]


class Edge(NamedTuple):
    """A drafted token below its parent.

    Args:
        rank: among the candidates of its parent, 1 being the head's first.
        raw: the head's probability of the token given its parent.
        used: what growth took for it; the same without an acceptance prior.
    """

    rank: int
    raw: float
    used: float


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One verify step of one request.

    Args:
        tokens, parents: the tree, node 0 being the root; the root alone where nothing was drafted.
        edges: of each node but the root.
        run: the tokens it brought: the accepted ones, then the target's own.
    """

    tokens: list[int]
    parents: list[int]
    edges: list[Edge]
    run: list[int]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or len(self.edges) != len(self.tokens) - 1:
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.parents)} parents and {len(self.edges)} edges are no tree"
            )


@dataclass(frozen=True, slots=True)
class OfferedLevel:
    """Candidates of a level `[B, E, W]`, best first, and the nodes they may follow; None for the root's.

    Args:
        scores: what growth took for their log-probabilities.
    """

    tokens: Tensor
    scores: Tensor
    parents: Frontier | None


@dataclass(slots=True)
class RecordedGrowth:
    """A growth that keeps what it is offered.

    Args:
        raw: the head's log-probabilities of each level, `[B, E, W]`, or `[B, 1, W]` where they are alike for all nodes.
    """

    growth: Growth
    levels: list[OfferedLevel] = field(default_factory=list)
    raw: list[Tensor] = field(default_factory=list)
    _frontier: Frontier | None = None

    def num_candidates(self, level: int) -> int:
        """See `TreeGrowth`."""
        return self.growth.num_candidates(level)

    def start(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """See `TreeGrowth`."""
        self.levels.append(OfferedLevel(tokens[:, None], log_probs[:, None], None))
        self._frontier = self.growth.start(tokens, log_probs)
        return self._frontier

    def expand(self, tokens: Tensor, log_probs: Tensor) -> Frontier:
        """See `TreeGrowth`."""
        self.levels.append(OfferedLevel(tokens, log_probs, self._frontier))
        self._frontier = self.growth.expand(tokens, log_probs)
        return self._frontier


def edges_of_trees(recorded: RecordedGrowth, trees: list[Tree]) -> list[list[Edge]]:
    """The edge to each node but the root, of every tree of a batch `[B]` that was grown."""
    offered: list[dict[Path, Edge]] = [{} for _ in trees]
    parents: list[list[Path]] = [[()] for _ in trees]
    for level, log_probs in zip(recorded.levels, recorded.raw, strict=True):
        if level.parents is not None:
            chosen, ranks = level.parents.tokens.tolist(), level.parents.parent_ranks.tolist()
            parents = [
                [(*above[rank], token) for rank, token in zip(ranks[row], chosen[row], strict=True)]
                for row, above in enumerate(parents)
            ]
        columns = (level.tokens, log_probs.expand_as(level.scores), level.scores)
        for known, above, *row in zip(offered, parents, *(column.tolist() for column in columns), strict=True):
            for parent, *own in zip(above, *row, strict=True):
                for rank, (token, log_prob, score) in enumerate(zip(*own, strict=True), start=1):
                    known[(*parent, token)] = Edge(rank, _probability(log_prob), _probability(score))
    return [[known[path] for path in _paths(tree)] for known, tree in zip(offered, trees, strict=True)]


def _probability(log_prob: float) -> float:
    """As growth reads it: above 0 counts as 0, NaN as impossible."""
    return 0.0 if math.isnan(log_prob) else math.exp(min(log_prob, 0.0))


def _paths(tree: Tree) -> list[Path]:
    """Tokens from below the root to each other node."""
    paths: list[Path] = [()]
    for token, parent in zip(*(column[1:] for column in tree), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@dataclass(frozen=True)
class _ObservedDrafting(TreeDrafting):
    """Drafts as another does.

    Args:
        recorded: the newest growth.
    """

    recorded: list[RecordedGrowth] = field(default_factory=list)

    def grow(self, growth: Growth, inputs: DraftInputs, depth: int, rankers: Rankers) -> None:
        recorded = RecordedGrowth(growth)
        self.recorded[:] = [recorded]
        super().grow(recorded, inputs, depth, rankers)

    def _scorer(self, rankers: Rankers, device: torch.device) -> Callable[[Tensor, int], Tensor]:
        score = super()._scorer(rankers, device)

        def record(log_probs: Tensor, level: int) -> Tensor:
            self.recorded[0].raw.append(log_probs)
            return score(log_probs, level)

        return record


class _ObservedDrafter:
    """A drafter that keeps the trees it hands over; see `Drafter`."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self.trees: dict[int, Tree] = {}

    def update_requests(self, plan: StepPlan) -> None:
        self._runner.update_requests(plan)

    def draft(self, plan: StepPlan) -> dict[int, Tree]:
        self.trees = self._runner.draft(plan)
        return self.trees

    def extend(self, runs: list[AcceptedRun], features: Tensor) -> None:
        self._runner.extend(runs, features)


class ObservedWorkers:
    """Answers plans as the workers given do, which it takes over.

    Args:
        steps: of each request id, in order.
        has_prior: whether trees grow by other scores than the head's own.
        draft_ms, verify_ms: of each step that verified and did not prefill.
    """

    def __init__(self, workers: LocalWorkers) -> None:
        """Raises `ValueError` for workers whose drafts cannot be watched."""
        runner = workers.drafter
        if not isinstance(runner, DraftRunner):
            raise ValueError("head: there is nothing to observe without a draft head")
        if runner.graphs is not None:
            raise ValueError("cuda_graphs: recorded drafts cannot be observed; run them eagerly")
        as_before = {each.name: getattr(runner.drafting, each.name) for each in fields(TreeDrafting)}
        runner.drafting = drafting = _ObservedDrafting(**as_before)
        self.has_prior = drafting.prior is not None and not drafting.prior.is_identity
        self._recorded = drafting.recorded
        self._drafter = _ObservedDrafter(runner)
        self._workers = LocalWorkers(workers.target, self._drafter)
        self.steps: dict[int, list[ObservedStep]] = {}
        self.draft_ms: list[float] = []
        self.verify_ms: list[float] = []

    def step(self, plan: StepPlan) -> StepResult:
        """See `LocalWorkers`."""
        result = self._workers.step(plan)
        trees = self._drafter.trees
        edges: dict[int, list[Edge]] = {}
        if trees:
            (recorded,) = self._recorded
            edges = dict(zip(trees, edges_of_trees(recorded, list(trees.values())), strict=True))
        runs = {run.request_id: run for run in result.runs}
        for item in plan.decode:
            tokens, parents = trees.get(item.request_id, ([-1], [-1]))
            step = ObservedStep(tokens, parents, edges.get(item.request_id, []), runs[item.request_id].tokens)
            self.steps.setdefault(item.request_id, []).append(step)
        if plan.decode and not plan.prefill:
            self.draft_ms.append(result.draft_ms)
            self.verify_ms.append(result.verify_ms)
        return result
