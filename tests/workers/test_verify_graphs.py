"""Recorded steps, replayed by doing them again: the same code that a CUDA graph records, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.kernel_set import load_kernels
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.kernels.triton_attention import TritonAttention
from eyas.workers.buckets import Bucket, GraphLimits, ladder, smallest_bucket, verify_buckets
from eyas.workers.draft import DraftRunner
from eyas.workers.graphs import EagerRecorder
from eyas.workers.kv_pool import PageTable, PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends
from eyas.workers.target import TargetRunner
from eyas.workers.verify_graphs import VerifyRequest

LAYOUT = PoolLayout(num_pages=60, page_size=8)
BACKENDS = {
    "reference": StepBackends(),
    "triton": StepBackends(load_kernels("triton"), TritonAttention),
}
SHAPES = {
    "dynamic": TreeShape(8, 3, 3),
    "chain": TreeShape(4, 3, 1),
    "wide": TreeShape(7, 1, 6),
    "alone": TreeShape(),
}


class PoisonedAttention(ReferenceAttention):
    """Leaves NaN in the rows that belong to nobody, as a kernel that skips them may."""

    def plan(self, rows: PagedRows) -> Any:
        planned, end = super().plan(rows), int(rows.row_starts[-1])

        def attend(*args: Any) -> Tensor:
            out = planned(*args)
            out[end:] = torch.nan
            return out

        return attend


def limits_of(shape: TreeShape, max_batch: int) -> GraphLimits:
    return GraphLimits(max_batch, shape.node_budget, shape.draft_depth, LAYOUT.num_pages, shape.width)


def recorded_workers(models: Any, shape: TreeShape, backends: StepBackends, head: Any, max_batch: int) -> LocalWorkers:
    target = TargetRunner(models.target, LAYOUT, models.random_head.config.aux_layers, backends)
    target.record_graphs(limits_of(shape, max_batch), EagerRecorder())
    if shape.node_budget == 1:
        return LocalWorkers(target, None)
    return LocalWorkers(target, DraftRunner(head, LAYOUT, backends=backends))


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_replayed_texts_are_plain_texts(
    shape: TreeShape, max_batch: int, models: Any, jobs: Any, plain_texts: Any, new_generation: Any
) -> None:
    """Catches padding rows that reach real ones, positions or slots of the wrong request, a walk or move that is off,
    sampling that differs from the eager step's, and batches that grow and shrink across buckets."""
    workers = recorded_workers(models, shape, BACKENDS["reference"], models.guessing_head, max_batch)
    generation = new_generation(workers, shape, max_batch_size=max_batch)
    for job in jobs:
        generation.submit(job)
    assert generation.run() == plain_texts
    lengths = [len(run.tokens) for run in generation.decode_runs]
    if shape.node_budget > 1:
        assert max(lengths) > 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, over the garbage in padding rows
def test_triton_replays_plain_texts(models: Any, jobs: Any, plain_texts: Any, new_generation: Any) -> None:
    """The same through every Triton kernel of the step."""
    shape = TreeShape(5, 3, 3)
    workers = recorded_workers(models, shape, BACKENDS["triton"], models.guessing_head, 2)
    generation = new_generation(workers, shape, max_batch_size=2)
    for job in jobs[:2]:
        generation.submit(job)
    assert generation.run() == plain_texts[:2]


def test_ties_of_nearly_greedy_requests(
    models: Any, jobs: Any, new_generation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches temperatures that float32 takes for 0: eager steps break ties by noise, recorded ones would by id."""
    decoder, shape = type(models.target), SHAPES["alone"]
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda self, hidden: 0.0 * logits(self, hidden))
    recorded = recorded_workers(models, shape, BACKENDS["reference"], None, 1)
    texts = []
    for workers in (models.workers(LAYOUT, None), recorded):
        generation = new_generation(workers, shape)
        generation.submit(replace(jobs[0], sampling=SamplingParams(temperature=1e-50, seed=4)))
        texts.append(generation.run())
    assert texts[0] == texts[1]
    assert len(set(texts[0][0])) > 1


def requests_of(models: Any, runner: TargetRunner, count: int, size: int) -> list[VerifyRequest]:
    """Requests whose prefix is whatever the pool holds, with chains and forks of different sizes."""
    requests = []
    for index in range(count):
        pages = PageTable(LAYOUT, torch.device("cpu"))
        pages.append([3 * index, 3 * index + 1, 3 * index + 2])
        own = 1 + (size + index) % 5
        tokens, parents = [7 + index, 1, 2, 3, 4][:own], [-1, 0, 0, 1, 3][:own]
        sampling = SamplingParams(temperature=0.5 * (index % 3), top_p=0.9 if index % 2 else 1.0, seed=index)
        requests.append(VerifyRequest(index, tokens, parents, 9 + index, pages, sampling))
    return requests


def test_padding_is_never_read(models: Any) -> None:
    """Catches a replay that depends on what earlier, larger steps left in its buffers, or on unwritten slots.

    Every slot that no request holds and every padding row's attention is NaN; batches shrink and grow through all
    sizes.
    """
    runner = TargetRunner(models.target, LAYOUT, (0, 2), StepBackends(attention=PoisonedAttention))
    runner.record_graphs(GraphLimits(5, 5, 3, LAYOUT.num_pages, 4), EagerRecorder())
    graphs = runner.graphs
    generator = torch.Generator().manual_seed(0)
    for cache in runner.pool.caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    clean = [cache.clone() for cache in runner.pool.caches]
    expected = {}
    for count in (1, 2, 3, 4, 5):
        for cache, saved in zip(runner.pool.caches, clean, strict=True):
            cache.copy_(saved)
        outcome = graphs.verify(requests_of(models, runner, count, count))
        expected[count] = (outcome.tokens, outcome.features.clone(), [c[: 8 * 15].clone() for c in runner.pool.caches])
    for count in (5, 1, 4, 2, 3, 5, 3):
        for cache, saved in zip(runner.pool.caches, clean, strict=True):
            cache.copy_(saved)
            cache[8 * 15 :] = torch.nan
        outcome = graphs.verify(requests_of(models, runner, count, count))
        tokens, features, caches = expected[count]
        assert outcome.tokens == tokens
        assert not outcome.not_finite
        torch.testing.assert_close(outcome.features, features, rtol=0, atol=0)
        for cache, saved in zip(runner.pool.caches, caches, strict=True):
            assert torch.equal(cache[: 8 * 15], saved)


def test_not_finite_logits_name_their_request(models: Any) -> None:
    """Catches a NaN that fails its neighbours, or nobody."""
    runner = TargetRunner(models.target, LAYOUT, ())
    runner.record_graphs(GraphLimits(4, 5, 3, LAYOUT.num_pages, 4), EagerRecorder())
    requests = requests_of(models, runner, 3, 2)
    runner.pool.keys[0][requests[1].pages.slots[4]] = torch.nan
    outcome = runner.graphs.verify(requests)
    assert outcome.not_finite == [1]
    assert outcome.features is None


def test_a_broken_tree_is_refused(models: Any) -> None:
    """Catches a missing parent that is taken for the root."""
    runner = TargetRunner(models.target, LAYOUT, ())
    runner.record_graphs(GraphLimits(1, 5, 3, LAYOUT.num_pages, 4), EagerRecorder())
    (request,) = requests_of(models, runner, 1, 3)
    broken = VerifyRequest(0, request.tokens, [-1, 0, 3, 1], request.num_committed, request.pages, request.sampling)
    with pytest.raises(ValueError, match=r"the parents \[-1, 0, 3, 1\] of request 0 are no tree"):
        runner.graphs.verify([broken])


def test_buckets_hold_every_step() -> None:
    """Catches a batch or node count between two rungs without a bucket, and one that is too small."""
    limits = GraphLimits(max_batch=6, max_nodes=10, draft_depth=4, max_pages=1, width=4)
    buckets = verify_buckets(limits)
    assert buckets[0] == Bucket(60, 6)
    assert buckets == sorted(set(buckets), reverse=True)
    for batch in range(1, 7):
        for num_rows in range(batch, 10 * batch + 1):
            bucket = smallest_bucket(buckets, num_rows, batch)
            assert bucket.num_rows >= num_rows
            assert bucket.batch >= batch
    with pytest.raises(ValueError, match="no recorded step holds 61 nodes of 6 requests"):
        smallest_bucket(buckets, 61, 6)


def test_ladder_ends_at_the_limit() -> None:
    assert [ladder(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
