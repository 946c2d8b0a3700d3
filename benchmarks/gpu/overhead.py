"""Step: what a whole decode step takes besides the device's own work: draft, verify, extend, all in one process.

The device's work is the sum of its kernels' and copies' durations as the profiler saw them, over steps of their own,
since a profiled step is slower for the host. The rest is time in which the device waits.
"""

from __future__ import annotations

from device_backends import backends_called
from engine import Engine, TreeShape
from outcome import Context, Outcome
from random_models import LLAMA_3_8B, TINY, random_head, random_target
from timing import busy_ms, wall_ms

from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.graphs import recorder_for
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.target import TargetRunner

BATCHES: tuple[int, ...] = (1, 8, 64)
PAGE_SIZE = 16
SHAPE = TreeShape(num_nodes=8, draft_depth=5, width=4)
STEPS_AT_MOST = 70  # of a batch, profiled or not: each may accept a whole path


def run(context: Context) -> Outcome:
    shape, name, batches, prompt_length = LLAMA_3_8B, "triton", BATCHES, 256
    if context.dry_run:
        shape, name, batches, prompt_length = TINY, "reference", (1, 2), 20
    target = random_target(shape, context.dtype, context.device)
    head = random_head(shape, target)
    max_length = prompt_length + STEPS_AT_MOST * (SHAPE.draft_depth + 1) + SHAPE.num_nodes * SHAPE.width
    pages_each = -(-max_length // PAGE_SIZE)
    layout = PoolLayout(sum(batches) * pages_each, PAGE_SIZE)
    backends = backends_called(name)
    engine = Engine(
        TargetRunner(target, layout, head.capture, backends), DraftRunner(head, layout, backends=backends), layout
    )
    assert engine.drafter is not None
    limits = GraphLimits(max(batches), SHAPE.num_nodes, SHAPE.draft_depth, pages_each, SHAPE.width)
    engine.target.record_graphs(limits, recorder_for(context.device))
    engine.drafter.record_graphs(limits, recorder_for(context.device))
    outcome = Outcome(
        settings={
            "model": shape.name,
            "dtype": str(context.dtype),
            "kernels_and_attention": name,
            "prompt_length": prompt_length,
            "tree": f"{SHAPE.num_nodes} nodes, depth {SHAPE.draft_depth}, width {SHAPE.width}",
        }
    )
    first = 0
    for batch in batches:
        requests = list(range(first, first + batch))
        engine.admit(requests, prompt_length, max_length)
        step_ms = wall_ms(lambda: engine.step(SHAPE), context.device)
        kernels_ms = busy_ms(lambda: engine.step(SHAPE), context.device)
        outcome.rows.append(
            {
                "batch": batch,
                "step_ms": step_ms,
                "kernels_ms": kernels_ms,
                "outside_ms": step_ms - kernels_ms,
                "outside_share": 1 - kernels_ms / step_ms,
            }
        )
        engine.finish(requests)
        first += batch
    if context.dry_run:
        outcome.omitted.append("kernels: the profiler adds up the operators of the CPU instead")
    return outcome
