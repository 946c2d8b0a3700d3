"""Recorded drafts, replayed by doing them again: the same code that a CUDA graph records, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.kernel_set import load_kernels
from eyas.kernels.sample import perturb
from eyas.kernels.static_tree import TreeChoices
from eyas.kernels.triton_attention import TritonAttention
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.graphs import EagerRecorder
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.messages import StepPlan
from eyas.workers.rankers import DeviceRankers
from eyas.workers.sampler import NoiseRanker, RowSampling
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends

LAYOUT = PoolLayout(num_pages=60, page_size=8)
BACKENDS = {
    "reference": StepBackends(),
    "triton": StepBackends(load_kernels("triton"), TritonAttention),
}
SHAPES = {
    "dynamic": TreeShape(8, 3, 3),
    "whole pool": TreeShape(13, 2, 3),
    "chain": TreeShape(4, 3, 1),
    "one level": TreeShape(5, 1, 4),
    "static": TreeShape.fixed(TreeChoices.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])),
}


class TwinDrafter(DraftRunner):
    """Drafts eagerly and from recordings, on one pool, and compares."""

    num_compared = 0

    def draft(self, plan: StepPlan) -> dict[int, tuple[list[int], list[int]]]:
        recorded, self.graphs = self.graphs, None
        eager = super().draft(plan)
        self.graphs = recorded
        replayed = super().draft(plan)
        assert replayed.keys() == eager.keys()
        for request_id, tree in eager.items():
            # In a nucleus the eager ranker cuts the distribution off, which changes no text.
            if self._requests[request_id].sampling.top_p == 1.0:
                assert replayed[request_id] == tree
                self.num_compared += 1
        return replayed


def workers_of(models: Any, shape: TreeShape, backends: StepBackends, max_batch: int) -> LocalWorkers:
    drafter = TwinDrafter(models.guessing_head, LAYOUT, choices=shape.choices, backends=backends)
    limits = GraphLimits(max_batch, shape.node_budget, shape.draft_depth, LAYOUT.num_pages, shape.width)
    drafter.record_graphs(limits, EagerRecorder())
    return LocalWorkers(models.target_runner(LAYOUT), drafter)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_replayed_drafts_are_eager_drafts(
    shape: TreeShape, max_batch: int, models: Any, jobs: Any, plain_texts: Any, new_generation: Any
) -> None:
    """Catches a level that lands on another's slots, noise of the wrong position, padding requests that reach real
    ones, and a recording that advances what it starts from."""
    workers = workers_of(models, shape, BACKENDS["reference"], max_batch)
    generation = new_generation(workers, shape, max_batch_size=max_batch)
    for job in jobs:
        generation.submit(job)
    assert generation.run() == plain_texts
    assert workers.drafter.num_compared > 10


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, over the garbage in padding rows
@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_triton_drafts_are_eager_drafts(
    name: str, models: Any, jobs: Any, plain_texts: Any, new_generation: Any
) -> None:
    """The same through every Triton kernel of a draft."""
    workers = workers_of(models, SHAPES[name], BACKENDS["triton"], 3)
    generation = new_generation(workers, SHAPES[name], max_batch_size=3)
    for job in jobs[:3]:
        generation.submit(job)
    assert generation.run() == plain_texts[:3]
    assert workers.drafter.num_compared > 3


def test_a_replay_leaves_its_inputs_as_they_were(models: Any, jobs: Any, new_generation: Any) -> None:
    """Catches a graph that can be replayed only once: one whose states, lengths or budgets move."""
    workers = workers_of(models, SHAPES["dynamic"], BACKENDS["reference"], 4)
    generation = new_generation(workers, SHAPES["dynamic"], max_batch_size=4)
    for job in jobs[:4]:
        generation.submit(job)
    for _ in generation.steps():
        pass
    graphs = workers.drafter.graphs
    recorded = graphs._drafts[4]
    before = (recorded._block._device.clone(), graphs._states.clone(), graphs._pages.device.clone())
    with torch.inference_mode():
        recorded._draft()
        first = recorded._results.clone()
        recorded._draft()
    assert torch.equal(first, recorded._results)
    for saved, now in zip(before, (recorded._block._device, graphs._states, graphs._pages.device), strict=True):
        assert torch.equal(saved, now)


def test_nearly_greedy_requests_are_ranked_with_noise() -> None:
    """Catches temperatures that float32 takes for 0, which would rank ties by id and not as the target breaks them."""
    temperatures, seeds = torch.tensor([1e-50, 0.0], dtype=torch.float64), torch.tensor([4, 4])
    ranker = DeviceRankers(temperatures, seeds, torch.tensor([7, 7]), perturb)(range(1, 2), 1, 3)
    rows = RowSampling([SamplingParams(1e-50, seed=4), SamplingParams(seed=4)], [8, 8])
    logits, ids = torch.zeros(2, 50), torch.arange(50)
    ranked, expected = ranker.rank(logits, ids), NoiseRanker(rows, 3).rank(logits, ids)
    assert torch.equal(ranked.tokens[0], expected.tokens[0])
    assert not torch.equal(ranked.tokens[0], ranked.tokens[1])
