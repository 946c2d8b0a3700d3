"""Whole drafts replayed from recordings, one per batch size: every call of the head, every level's selection, the tree.

A recording advances nothing in place: positions and ancestors of a level are made from the inputs anew, so that its
buffers stand after a replay as they stood before.

Letters: B requests of a bucket, N nodes, W candidates, S width of a head's state, T rows of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.kernels.static_tree import StaticGrowth
from eyas.kernels.tree import DraftTrees
from eyas.workers.buckets import GraphLimits, ladder
from eyas.workers.graphs import Progress, Recorder, no_progress
from eyas.workers.input_block import InputBlock, PageRows
from eyas.workers.kv_pool import PageTable
from eyas.workers.rankers import DeviceRankers, Perturb
from eyas.workers.sampling import SamplingParams
from eyas.workers.tree_drafting import DraftInputs, TreeDrafting, stacked_states


class Drafting(Protocol):
    """What a recording needs to know of a request."""

    sampling: SamplingParams
    pages: PageTable
    num_covered: int
    root: int
    state: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Args:
    new_growth: an empty growth of the shape in use, which reads no device value with `max_nodes` given.
    depth: its levels.
    num_drafted: nodes that the head runs over, all levels together.
    """

    new_growth: Callable[[], TreeGrowth | StaticGrowth]
    depth: int
    num_drafted: int


class DraftGraphs:
    """All recorded drafts of one drafter."""

    def __init__(
        self, drafting: TreeDrafting, shape: DraftShape, perturb: Perturb, shares_noise: bool, limits: GraphLimits,
        recorder: Recorder, scratch_page: int,
    ) -> None:  # fmt: skip
        self._drafting = drafting
        self._shape = shape
        self._perturb = perturb
        self._shares_noise = shares_noise
        self._limits = limits
        self._recorder = recorder
        self._pages = PageRows(limits.max_batch, limits.max_pages, scratch_page, drafting.head.device)
        self._states = torch.zeros(
            limits.max_batch, drafting.head.state_size, dtype=drafting.head.dtype, device=drafting.head.device
        )
        self.batches = ladder(limits.max_batch)
        self._drafts: dict[int, _RecordedDraft] = {}

    @torch.inference_mode()
    def record(self, on_progress: Progress = no_progress) -> None:
        """Record every batch size, the largest first; `on_progress` is told how many of how many are done."""
        for done, batch in enumerate(reversed(self.batches)):
            on_progress(done, len(self.batches))
            self._drafts[batch] = _RecordedDraft(
                batch, self._drafting, self._shape, self._perturb, self._limits, self._states[:batch],
                self._pages.device[:batch], self._recorder,
            )  # fmt: skip
        on_progress(len(self.batches), len(self.batches))

    @torch.inference_mode()
    def draft(self, request_ids: list[int], requests: Sequence[Drafting], budgets: list[int]) -> DraftTrees:
        """Trees on the host, padded to the largest number of nodes.

        Raises:
            ValueError: if no recorded batch holds so many requests.
        """
        count = len(requests)
        batch = next((size for size in self.batches if size >= count), None)
        if batch is None:
            raise ValueError(f"no recorded draft holds {count} requests; the largest holds {self.batches[-1]}")
        self._pages.upload(request_ids, [each.pages.page_ids for each in requests], batch)
        self._states[:count].copy_(stacked_states([each.state for each in requests]))
        return self._drafts[batch].run(requests, budgets, self._shares_noise)


class _RecordedDraft:
    """One batch size's buffers and recording."""

    def __init__(
        self, batch: int, drafting: TreeDrafting, shape: DraftShape, perturb: Perturb, limits: GraphLimits,
        states: Tensor, page_table: Tensor, recorder: Recorder,
    ) -> None:  # fmt: skip
        device, max_nodes = drafting.head.device, limits.max_nodes
        fields = ("roots", "covered", "budgets", "seeds", "temperatures")
        self._block = InputBlock(dict.fromkeys(fields, (batch,)), device)
        block = self._block
        block.upload()
        page_size = 1 if drafting.pool is None else drafting.pool.layout.page_size
        inputs = DraftInputs(
            states=states,
            covered=block.device["covered"],
            page_table=page_table,
            max_covered=max(limits.max_pages * page_size - shape.num_drafted, 0),
        )
        rankers = DeviceRankers(
            block.device_floats("temperatures"), block.device["seeds"], block.device["covered"], perturb
        )
        self._results = torch.zeros(batch, 2 * max_nodes + 2, dtype=torch.int64, device=device)

        def draft() -> None:
            growth = shape.new_growth()
            drafting.grow(growth, inputs, shape.depth, rankers)
            selected = growth.finish(block.device["roots"], block.device["budgets"], max_nodes)
            trees = selected.trees
            counts = torch.stack([trees.num_nodes, selected.is_closed], dim=1)
            self._results.copy_(torch.cat([trees.tokens, trees.parents, counts], dim=1))

        self._max_nodes = max_nodes
        self._draft = recorder.record(draft)

    def run(self, requests: Sequence[Drafting], budgets: list[int], shares_noise: bool) -> DraftTrees:
        host, count = self._block.host, len(requests)
        for field in host.values():
            field.fill(0)
        host["roots"][:count] = [each.root for each in requests]
        host["covered"][:count] = [each.num_covered for each in requests]
        host["budgets"][:count] = budgets
        host["seeds"][:count] = [each.sampling.seed for each in requests]
        if shares_noise:
            self._block.host_floats("temperatures")[:count] = [each.sampling.temperature for each in requests]
        self._block.upload()
        self._draft()
        results = self._results[:count].cpu()
        if not bool(results[:, -1].all()):
            raise ValueError("a kept candidate's parent was not kept before it: scores are not ancestor-closed")
        tokens, parents, counts = results.split([self._max_nodes, self._max_nodes, 2], dim=1)
        return DraftTrees(tokens, parents, counts[:, 0])
