"""Trees grown by an acceptance prior's scores: other trees, the same texts, eagerly and from recordings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.grow import TreeGrowth
from eyas.kernels.static_tree import TreeChoices
from eyas.kernels.triton_grow import OPERATIONS
from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.head_writing import save_prior
from eyas.models.medusa import MedusaHead
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.graphs import EagerRecorder
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.loading import EngineSpec, load_drafter
from eyas.workers.local import LocalWorkers
from eyas.workers.messages import StepPlan
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.workers.conftest import Generation, Job, Models

NewPrior = Callable[..., AcceptancePrior]
Trees = dict[int, tuple[list[int], list[int]]]
Call = tuple[Tensor, Tensor, Tensor]
LAYOUT = PoolLayout(num_pages=60, page_size=8)
SHAPES = {
    "dynamic": TreeShape(8, 3, 3),
    "wider and deeper than the prior": TreeShape(12, 4, 5),
    "chain": TreeShape(4, 3, 1),
    "one level": TreeShape(4, 1, 5),
}


class NotingPrior(AcceptancePrior):
    """Keeps raw scores, regimes and results of every call."""

    noted: list[Call]

    @staticmethod
    def of(prior: AcceptancePrior) -> NotingPrior:
        noting = NotingPrior(prior.knots, prior.greedy, prior.sampled)
        noting.noted = []
        return noting

    def apply(self, log_probs: Tensor, level: int, is_sampled: Tensor) -> Tensor:
        scores = super().apply(log_probs, level, is_sampled)
        self.noted.append((log_probs, is_sampled, scores))
        return scores


class TripleDrafter(DraftRunner):
    """Drafts by raw scores, then eagerly and from recordings by the prior's, and compares the latter two."""

    prior: NotingPrior
    num_compared = 0
    num_changed = 0

    def draft(self, plan: StepPlan) -> Trees:
        recorded, self.graphs = self.graphs, None
        drafting, self.drafting = self.drafting, copy.copy(self.drafting)
        object.__setattr__(self.drafting, "prior", None)
        raw = super().draft(plan)
        self.drafting = drafting
        eager, eager_calls = self._noted(plan)
        self.graphs = recorded
        replayed, replayed_calls = self._noted(plan)
        ids = [item.request_id for item in plan.decode if item.num_nodes > 1]
        for row, request_id in enumerate(ids):
            # In a nucleus the eager ranker cuts the distribution off, which changes no text.
            if self._requests[request_id].sampling.top_p == 1.0:
                assert replayed[request_id] == eager[request_id]
                self._compare(row, eager_calls, replayed_calls)
                self.num_compared += 1
                self.num_changed += eager[request_id] != raw[request_id]
        return replayed

    def _compare(self, row: int, eager: list[Call], replayed: list[Call]) -> None:
        """Heads compute in another order in the two forms; equal raw scores must make equal ones, bit by bit."""
        for level, (ours, theirs) in enumerate(zip(eager, replayed, strict=True), start=1):
            for (raw, _, scores), (_, is_sampled, _) in ((ours, theirs), (theirs, ours)):
                alone = AcceptancePrior.apply(self.prior, raw[row, None], level, is_sampled[row, None])
                assert torch.equal(alone[0], scores[row])
            torch.testing.assert_close(ours[2][row], theirs[2][row], atol=1e-3, rtol=1e-3)

    def _noted(self, plan: StepPlan) -> tuple[Trees, list[Call]]:
        self.prior.noted = []
        trees = super().draft(plan)
        return trees, self.prior.noted


def workers_of(models: Models, shape: TreeShape, prior: AcceptancePrior, max_batch: int) -> LocalWorkers:
    head = copy.copy(models.guessing_head)
    head.acceptance_prior = NotingPrior.of(prior)
    drafter = TripleDrafter(head, LAYOUT)
    drafter.prior = head.acceptance_prior
    limits = GraphLimits(max_batch, shape.node_budget, shape.draft_depth, LAYOUT.num_pages, shape.width)
    drafter.record_graphs(limits, EagerRecorder())
    return LocalWorkers(models.target_runner(LAYOUT), drafter)


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_calibrated_trees_write_the_plain_text(
    shape: str, max_batch: int, models: Models, jobs: list[Job], plain_texts: Any, new_generation: Any,
    new_prior: NewPrior,
) -> None:  # fmt: skip
    """Catches scores that reach more than the tree, requests scored in another's regime in one of the two forms, and
    padding requests that reach real ones."""
    workers = workers_of(models, SHAPES[shape], new_prior(seed=max_batch), max_batch)
    generation = new_generation(workers, SHAPES[shape], max_batch_size=max_batch)
    for job in jobs:
        generation.submit(job)
    assert generation.run() == plain_texts
    assert workers.drafter.num_compared > 10
    is_choice = shape not in ("chain", "one level")  # where scores decide nothing, or only between siblings
    assert (workers.drafter.num_changed > 5) == is_choice


def test_triton_grows_from_calibrated_scores(new_prior: NewPrior) -> None:
    """Catches scores in a layout or type that the kernel does not take, also where all nodes of a level share them."""
    raw = -torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(4)).cumsum(3)
    regimes, tokens = torch.tensor([True, False]), torch.arange(4).expand(2, 4, 4)
    first = new_prior().apply(raw[0], 1, regimes)[:, 0]
    levels = [new_prior().apply(raw[1], 2, regimes), new_prior().apply(raw[2, :, :1], 3, regimes).expand(-1, 4, -1)]
    trees = []
    for operations in (None, OPERATIONS):
        growth = TreeGrowth(4, operations)
        growth.start(tokens[:, 0], first)
        for scores in levels:
            growth.expand(tokens, scores)
        trees.append(growth.finish(torch.zeros(2, dtype=torch.int64), torch.tensor([9, 12]), 12).trees)
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)


@pytest.fixture(scope="module")
def medusa(models: Models, tiny_models: Any) -> MedusaHead:
    from safetensors.torch import save_file

    from eyas.models.head_loading import load_head
    from eyas.models.target_weights import TargetWeights

    generator = torch.Generator().manual_seed(3)
    folder: Path = tiny_models._next_folder()
    folder.mkdir()
    tensors = {f"{i}.0.linear.weight": torch.randn(32, 32, generator=generator) / 32**0.5 for i in range(3)}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    weights = TargetWeights(models.target_folder, models.target.config)
    head = load_head(folder, weights, torch.float32, torch.device("cpu"))
    assert isinstance(head, MedusaHead)
    return head


def test_a_medusa_draft_scores_every_level_by_its_own_curves(
    models: Models, medusa: MedusaHead, jobs: list[Job], new_generation: type[Generation], plain_texts: Any,
    new_prior: NewPrior,
) -> None:  # fmt: skip
    """Catches a head that drafts all levels at once and is given one level's curves for all, or none."""
    head = copy.copy(medusa)
    head.acceptance_prior = NotingPrior.of(new_prior(depths=3))
    levels: list[int] = []
    apply = head.acceptance_prior.apply

    def noted(log_probs: Tensor, level: int, is_sampled: Tensor) -> Tensor:
        levels.append(level)
        return apply(log_probs, level, is_sampled)

    head.acceptance_prior.apply = noted  # type: ignore[method-assign]
    shape = TreeShape(12, 3, 4)
    workers = LocalWorkers(TargetRunner(models.target, LAYOUT, head.capture), DraftRunner(head, LAYOUT))
    generation = new_generation(workers, shape, max_batch_size=3)
    for job in jobs[:4]:
        generation.submit(job)
    assert generation.run() == plain_texts[:4]
    assert levels[:6] == [1, 2, 3, 1, 2, 3]


def test_fixed_shapes_and_plain_candidates_are_left_alone(models: Models, new_prior: NewPrior) -> None:
    """Catches curves of shared noise over candidates without it, and work on scores that no tree reads."""
    head = copy.copy(models.guessing_head)
    head.acceptance_prior = new_prior()
    assert DraftRunner(head, LAYOUT).drafting.prior is head.acceptance_prior
    assert DraftRunner(head, LAYOUT, choices=TreeChoices.cartesian([2, 1])).drafting.prior is None
    assert DraftRunner(head, LAYOUT, shares_noise=False).drafting.prior is None


@pytest.mark.parametrize("is_used", [True, False])
def test_an_engine_may_take_raw_scores(is_used: bool, tiny_models: Any, new_prior: NewPrior) -> None:
    """Catches the option that compares both ending on the way from the settings to the drafter."""
    target = tiny_models.target()
    head = tiny_models.head(target)
    save_prior(head, new_prior())
    spec = EngineSpec(str(target), str(head), "float32", "cpu", 8, 16, num_threads=1, acceptance_prior=is_used)
    drafter = load_drafter(spec)
    assert drafter is not None
    assert (drafter.drafting.prior is not None) == is_used
