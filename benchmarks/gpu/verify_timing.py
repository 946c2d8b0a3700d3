"""Step: a recorded verify step, from trees on the host to accepted tokens on the host, against the bandwidth floor.

The floor is the time to read every weight but the embedding once at the measured copy bandwidth. `ms` is what the
device works on a step, `step_ms` what the host waits for it. Each size is recorded by itself, since a served engine
records a ladder of sizes and pads to them.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

import torch
from device_backends import backends_called
from outcome import Bar, Context, Outcome
from random_models import LLAMA_3_8B, TINY, random_target, weight_bytes
from timed_recorder import TimedRecorder
from timing import WARMUP, copy_bandwidth, median_ms

from eyas.models.llama import LlamaDecoder
from eyas.workers.buckets import Bucket, GraphLimits
from eyas.workers.graphs import recorder_for
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends
from eyas.workers.tree_verification import TreeVerification
from eyas.workers.verify_graphs import VerifyGraphs, VerifyRequest

NODES = (1, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PAGE_SIZE = 16
BAR_NODES, BAR_BATCH, BAR_RATIO = 8, 1, 1.25


@dataclass(frozen=True, slots=True)
class Sizes:
    """Args:
    prefix: committed tokens of every request.
    context: tokens a request may have; attention is recorded for that many.
    draft_depth: bound of the walk.
    """

    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    prefix: int
    context: int
    draft_depth: int


@torch.inference_mode()
def run(context: Context) -> Outcome:
    if context.dry_run:
        shape, sizes, name = TINY, Sizes((1, 8), (1, 2), 40, 64, 4), "reference"
    else:
        shape, sizes, name = LLAMA_3_8B, Sizes(NODES, BATCHES, 1024, 8192, 8), "triton"
    model = random_target(shape, context.dtype, context.device)
    bandwidth = copy_bandwidth(1 << (24 if context.dry_run else 32), context.device)
    floor_ms = weight_bytes(model) / bandwidth * 1e3
    capture = shape.head_config.capture
    bench = _Bench(model, sizes, capture, backends_called(name))
    outcome = Outcome(
        settings={
            "model": shape.name,
            "dtype": str(context.dtype),
            "kernels_and_attention": name,
            "weight_bytes": weight_bytes(model),
            "copy_gb_per_s": bandwidth / 1e9,
            "prefix": sizes.prefix,
            "context": sizes.context,
            "captured_layers": list(capture),
        }
    )
    for batch in sizes.batches:
        for nodes in sizes.nodes:
            device_ms, step_ms = bench.measure(nodes, batch)
            outcome.rows.append(
                {
                    "batch": batch,
                    "nodes": nodes,
                    "ms": device_ms,
                    "step_ms": step_ms,
                    "floor_ms": floor_ms,
                    "of_floor": device_ms / floor_ms,
                }
            )
            if (nodes, batch) == (BAR_NODES, BAR_BATCH) and not context.dry_run:
                what = f"verify at {nodes} nodes, batch {batch}, over the bandwidth floor"
                outcome.bars.append(Bar(what, device_ms / floor_ms, BAR_RATIO))
    return outcome


class _Bench:
    """One target and one pool of random keys and values, over which steps of every size run."""

    def __init__(self, model: LlamaDecoder, sizes: Sizes, capture: tuple[int, ...], backends: StepBackends) -> None:
        config, device = model.config, model.device
        self._sizes = sizes
        self._capture = capture
        pages_each = -(-(sizes.prefix + max(sizes.nodes)) // PAGE_SIZE)
        layout = PoolLayout(max(sizes.batches) * pages_each, PAGE_SIZE)
        pool = KVPool(layout, config.num_layers, config.num_kv_heads, config.head_dim, model.dtype, device)
        for block in pool.blocks:
            block.normal_()
        self._verification = TreeVerification(
            model, pool, backends.attention(pool.geometry(config.num_heads)), backends.kernels, sizes.draft_depth
        )
        page_ids = random.Random(0).sample(range(layout.num_pages), layout.num_pages)
        self._tables = []
        for first in range(0, layout.num_pages, pages_each):
            self._tables.append(PageTable(layout, device))
            self._tables[-1].append(page_ids[first : first + pages_each])

    def measure(self, nodes: int, batch: int) -> tuple[float, float]:
        """Median time on the device and for the host, in ms."""
        device = self._verification.model.device
        recorder = TimedRecorder(recorder_for(device), device)
        limits = GraphLimits(batch, nodes, self._sizes.draft_depth, self._sizes.context // PAGE_SIZE, width=4)
        graphs = VerifyGraphs(self._verification, self._capture, limits, recorder)
        graphs.buckets = [Bucket(nodes * batch, batch)]
        graphs.record()
        requests = [self._request(index, nodes) for index in range(batch)]
        device_times = []

        def step_ms(_: int) -> float:
            start = time.perf_counter()
            graphs.verify(requests)
            elapsed_ms = (time.perf_counter() - start) * 1e3
            device_times.append(recorder.take_ms())
            return elapsed_ms

        host_ms = median_ms(step_ms)
        return statistics.median(device_times[WARMUP:]), host_ms

    def _request(self, index: int, nodes: int) -> VerifyRequest:
        """A tree of random tokens, two children each."""
        drawn = random.Random(index)
        vocab_size = self._verification.model.config.vocab_size
        return VerifyRequest(
            request_id=index,
            tokens=drawn.choices(range(vocab_size), k=nodes),
            parents=[(node - 1) // 2 if node else -1 for node in range(nodes)],
            num_committed=self._sizes.prefix,
            pages=self._tables[index],
            sampling=SamplingParams(),
        )
