"""Step: one layer's tree attention by each backend over the same pool, trees and page table.

The floor is the time to read the keys and values once at the measured copy bandwidth. Calls go over several layers'
pools in turn, so that no cache is warm, and are launched as an engine launches them: in a CUDA graph by backends that
can be captured, else one by one. `kernels_ms` leaves launches out, `with_plan_ms` adds what is planned once per step.
Results are compared with the reference first.

Letters: B requests, N nodes, P prefix, K pages of a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from outcome import Context, Outcome
from random_models import LLAMA_3_8B, TINY, ModelShape
from timing import busy_ms, copy_bandwidth, device_ms, wall_ms
from torch import Tensor

from eyas.kernels.attention_backend import AttentionGeometry, PlannedAttention
from eyas.kernels.backends import create_attention
from eyas.kernels.build import MaskEncoding, ancestor_mask, full_mask, packed_mask
from eyas.kernels.capabilities import ATTENTION_BACKENDS
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.tree import DraftTrees

PAGE_SIZE = 16
# Pools that are turned over: more bytes than any cache of the device holds.
TURNED_OVER_BYTES = 256 << 20
MAX_LAYERS = 32
# Outputs are means of values of unit scale; bfloat16 rounds them and their weights to 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Point:
    """One step: `batch` trees of `nodes` nodes, each after `prefix` committed tokens."""

    prefix: int
    nodes: int
    batch: int

    def __str__(self) -> str:
        return f"prefix {self.prefix}, {self.nodes} nodes, batch {self.batch}"

    @property
    def num_pages(self) -> int:
        """Of each request."""
        return -(-(self.prefix + self.nodes) // PAGE_SIZE)


class Scene:
    """The pools and the rows of a point; pages lie in random order."""

    def __init__(self, point: Point, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        config = shape.target_config
        self.point = point
        self.geometry = AttentionGeometry(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim, PAGE_SIZE, dtype, device
        )
        num_slots = point.batch * point.num_pages * PAGE_SIZE
        slot_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.kv_bytes = point.batch * (point.prefix + point.nodes) * slot_bytes
        self.num_layers = min(MAX_LAYERS, -(-TURNED_OVER_BYTES // (num_slots * slot_bytes)))
        if device.type == "cpu":
            self.num_layers = 1
        size = (self.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.keys = torch.randn(size, dtype=dtype, device=device)
        self.values = torch.randn(size, dtype=dtype, device=device)
        rows = point.batch * point.nodes
        self.query = torch.randn((rows, config.num_heads, config.head_dim), dtype=dtype, device=device)
        pages = torch.randperm(point.batch * point.num_pages, device=device)
        self._page_table = pages.view(point.batch, point.num_pages).int()

    def rows(self, encoding: MaskEncoding) -> PagedRows:
        point, device = self.point, self.geometry.device
        starts = torch.arange(point.batch + 1, dtype=torch.int32, device=device) * point.nodes
        parents = torch.arange(-1, point.nodes - 1, device=device) // 2  # two children each, and so -1 for the root
        trees = DraftTrees(
            tokens=torch.zeros((point.batch, point.nodes), dtype=torch.int64, device=device),
            parents=parents.expand(point.batch, -1).contiguous(),
            num_nodes=torch.full((point.batch,), point.nodes, device=device),
        )
        prefixes = torch.full((point.batch,), point.prefix, device=device)
        mask = ancestor_mask(trees)
        if encoding is MaskEncoding.PACKED:
            mask = packed_mask(mask)
        elif encoding is MaskEncoding.FULL:
            mask = full_mask(mask, prefixes, trees.num_nodes)
        return PagedRows(
            row_starts=starts,
            prefix_lengths=prefixes.int(),
            block_lengths=trees.num_nodes.int(),
            page_table=self._page_table,
            mask=mask,
            max_rows=point.nodes,
            max_block=point.nodes,
            max_prefix=point.prefix,
        )


def run(context: Context) -> Outcome:
    """Eyas's own; FlashInfer's come in a step of their own, after the one that compiles them."""
    return measure(context, [name for name in ATTENTION_BACKENDS if not name.startswith("flashinfer")])


def measure(context: Context, backends: list[str]) -> Outcome:
    """All points by these backends; each is compared with the first."""
    if context.dry_run:
        shape, points = TINY, [Point(*sizes) for sizes in itertools.product((48,), (8,), (1, 2))]
    else:
        shape = LLAMA_3_8B
        points = [Point(*sizes) for sizes in itertools.product((2048, 32768), (8, 64), (1, 16))]
    bandwidth = copy_bandwidth(1 << (24 if context.dry_run else 32), context.device)
    outcome = Outcome(settings={"model": shape.name, "dtype": str(context.dtype), "page_size": PAGE_SIZE,
                                "copy_gb_per_s": bandwidth / 1e9})  # fmt: skip
    broken: dict[str, str] = {}
    for point in points:
        scene = Scene(point, shape, context.dtype, context.device)
        expected = None
        for name in backends:
            if name in broken:
                continue
            try:
                row, out = _measure(name, scene, bandwidth)
            except Exception as error:
                broken[name] = f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            expected = out if expected is None else expected
            difference = float((out - expected).abs().max())
            if not difference <= TOLERANCE[context.dtype]:
                outcome.failures.append(f"{name} at {point} is {difference:.1e} off the reference")
            outcome.rows.append({"case": str(point), "backend": name} | row | {"off_reference": difference})
    outcome.failures += broken.values()
    return outcome


def _measure(name: str, scene: Scene, bandwidth: float) -> tuple[dict[str, object], Tensor]:
    backend = create_attention(ATTENTION_BACKENDS[name], scene.geometry)
    rows, device = scene.rows(backend.mask_encoding), scene.geometry.device
    planned = backend.plan(rows)
    out = planned(scene.query, scene.keys[0], scene.values[0])[: scene.query.shape[0]].float()
    is_captured = ATTENTION_BACKENDS[name].graph_capture and device.type == "cuda"
    replay = _over_all_layers(planned, scene, is_captured)
    floor_ms = scene.kv_bytes / bandwidth * 1e3
    kernels_ms = busy_ms(replay, device) / scene.num_layers

    def plan_and_run() -> None:
        backend.plan(rows)(scene.query, scene.keys[0], scene.values[0])

    return {
        "launched": "graph" if is_captured else "eager",
        "ms": device_ms(lambda _: replay(), device) / scene.num_layers,
        "kernels_ms": kernels_ms,
        "floor_ms": floor_ms,
        "of_floor": kernels_ms / floor_ms,
        "with_plan_ms": wall_ms(plan_and_run, device),
    }, out


def _over_all_layers(planned: PlannedAttention, scene: Scene, is_captured: bool) -> Callable[[], object]:
    """A call that attends in every layer, as one CUDA graph if `is_captured`."""

    def attend() -> None:
        for layer in range(scene.num_layers):
            planned(scene.query, scene.keys[layer], scene.values[layer])

    if not is_captured:
        return attend
    attend()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attend()
    return graph.replay
