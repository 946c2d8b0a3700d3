"""Step: growing the trees of a batch, replayed as one graph and launched kernel by kernel.

Both run the same code over the same buffers; an eager draft is what `--eager` serves with. Times are the host's, from
the requests' states on the device to the trees on the host.
"""

from __future__ import annotations

import random

import torch
from device_backends import backends_called
from outcome import Bar, Context, Outcome
from random_models import LLAMA_3_8B, TINY, ModelShape, random_head, random_target
from timing import wall_ms

from eyas.kernels.tree import DraftTrees
from eyas.models.eagle3 import Eagle3Head
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRequest, DraftRunner
from eyas.workers.graphs import EagerRecorder, Recorder, recorder_for
from eyas.workers.kv_pool import PageTable, PoolLayout
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends

BATCHES: tuple[int, ...] = (1, 4, 16, 64)
PAGE_SIZE = 16
NODES, DEPTH, WIDTH = 8, 5, 4
BAR_BATCH, BAR_RATIO = 1, 0.4


@torch.inference_mode()
def run(context: Context) -> Outcome:
    shape, name, batches, prefix, max_tokens = LLAMA_3_8B, "triton", BATCHES, 1024, 8192
    if context.dry_run:
        shape, name, batches, prefix, max_tokens = TINY, "reference", (1, 2), 20, 64
    head = _head(shape, context)
    outcome = Outcome(
        settings={
            "head": f"EAGLE-3 of {shape.name}",
            "dtype": str(context.dtype),
            "kernels_and_attention": name,
            "nodes": NODES,
            "depth": DEPTH,
            "width": WIDTH,
            "prefix": prefix,
            "context": max_tokens,
        }
    )
    for batch in batches:
        limits = GraphLimits(batch, NODES, DEPTH, max_tokens // PAGE_SIZE, WIDTH)
        backends = backends_called(name)
        eager_ms, eager_trees = _measure(head, limits, prefix, backends, EagerRecorder())
        graph_ms, graph_trees = _measure(head, limits, prefix, backends, recorder_for(context.device))
        ratio = graph_ms / eager_ms
        outcome.rows.append({"batch": batch, "eager_ms": eager_ms, "graph_ms": graph_ms, "of_eager": ratio})
        if graph_trees != eager_trees:
            outcome.failures.append(f"batch {batch}: the graph drew other trees than the eager loop")
        if not context.dry_run and batch == BAR_BATCH:
            outcome.bars.append(Bar(f"draft loop at batch {batch}, graph over eager", ratio, BAR_RATIO))
    return outcome


def _measure(
    head: Eagle3Head, limits: GraphLimits, prefix: int, backends: StepBackends, recorder: Recorder
) -> tuple[float, list[list[int]]]:
    """Time of a draft in ms, and what it drew: tokens and parents of every request."""
    runner, requests = _runner(head, limits, prefix, backends)
    runner.record_graphs(limits, recorder)
    graphs = runner.graphs
    assert graphs is not None

    def draft() -> DraftTrees:
        return graphs.draft(list(range(len(requests))), requests, [NODES] * len(requests))

    drafted = draft()
    return wall_ms(draft, head.device), [*drafted.tokens.tolist(), *drafted.parents.tolist()]


def _head(shape: ModelShape, context: Context) -> Eagle3Head:
    """Of a target that needs no layers here: the head reads its embedding alone."""
    return random_head(shape, random_target(shape, context.dtype, context.device, num_layers=0))


def _runner(
    head: Eagle3Head, limits: GraphLimits, prefix: int, backends: StepBackends
) -> tuple[DraftRunner, list[DraftRequest]]:
    """A drafter over random keys and values, and a full batch of requests whose prompts are through."""
    pages_each = -(-(prefix + DEPTH * WIDTH) // PAGE_SIZE)
    layout = PoolLayout(limits.max_batch * pages_each, PAGE_SIZE)
    runner = DraftRunner(head, layout, backends=backends)
    generator = torch.Generator(head.device).manual_seed(0)
    if runner.pool is not None:
        for block in runner.pool.blocks:
            block.normal_(generator=generator)
    page_ids = random.Random(0).sample(range(layout.num_pages), layout.num_pages)
    requests = []
    for index in range(limits.max_batch):
        pages = PageTable(layout, head.device)
        pages.append(page_ids[index * pages_each : (index + 1) * pages_each])
        size = (head.config.hidden_size,)
        state = torch.randn(size, dtype=head.dtype, device=head.device, generator=generator)
        requests.append(DraftRequest([], SamplingParams(), pages, num_covered=prefix, root=index, state=state))
    return runner, requests
