"""The drafter's side of a step: extend over what was accepted, grow a tree, hand it over.

A plain class: it knows nothing of Ray or sockets. Invariant when a tree is grown: the draft KV covers exactly positions
0 … n - 1, each from (true target feature i, token i + 1), never from the head's own guesses; drafted rows are written
above n and overwritten by the next `extend`.

Letters: T rows, B requests, W candidates per parent, S width of a head's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.kernels.static_tree import ShapeIndices, StaticGrowth, TreeChoices
from eyas.models.attention import Attention, no_attention
from eyas.models.head import DraftHead
from eyas.models.layers import use_operations
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft_graphs import DraftGraphs, DraftShape
from eyas.workers.graphs import Progress, Recorder, no_progress
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout, page_table
from eyas.workers.messages import AcceptedRun, StepPlan
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, causal_rows
from eyas.workers.rankers import HostRankers
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends
from eyas.workers.tree_drafting import DraftInputs, TreeDrafting, stacked_states


@dataclass(slots=True)
class DraftRequest:
    """One request's state on the drafter.

    Args:
        num_covered: positions 0 … num_covered - 1 have draft KV from true target features.
        root: the newest token of the text.
        state: the head's state after the newest pair, `[S]`; None until the prompt is through.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    pages: PageTable
    num_covered: int = 0
    root: int = -1
    state: Tensor | None = None


class DraftRunner:
    """Executes the drafting part of step plans."""

    def __init__(
        self, head: DraftHead, layout: PoolLayout, shares_noise: bool = True, choices: TreeChoices | None = None,
        backends: StepBackends | None = None,
    ) -> None:  # fmt: skip
        """Args:
        shares_noise: rank candidates under the target's own noise; False is plain top-k by raw scores, kept for
            comparison.
        choices: shape of every tree; None grows it from the scores.
        backends: None computes with the reference.

        Raises:
            ValueError: for a shape that asks for more candidates than the head can propose.
        """
        if choices is not None:
            widest = max(choices.num_candidates(level) for level in range(1, choices.depth + 1))
            if widest > head.max_candidates:
                raise ValueError(
                    f"tree: the shape asks for {widest} candidates of one node, the head can propose only "
                    f"{head.max_candidates} tokens; use a narrower tree"
                )
        self.head = head
        self.layout = layout
        self.device = head.device
        self.dtype = head.dtype
        self._shares_noise = shares_noise
        self._choices = choices
        self._requests: dict[int, DraftRequest] = {}
        self.pool: KVPool | None = None
        cache = head.cache
        if cache is not None:
            self.pool = KVPool(
                layout, cache.num_layers, cache.num_kv_heads, cache.head_dim, self.dtype, self.device,
                cache.value_head_dim,
            )  # fmt: skip
        backends = backends or StepBackends()
        self.kernels = backends.kernels
        use_operations(head, self.kernels.fused)
        self.attention = None
        if self.pool is not None and cache is not None:
            self.attention = backends.attention(self.pool.geometry(cache.num_heads))
        # A fixed shape has no use for scores, and the curves are not those of plain candidates under a noisy target.
        prior = head.acceptance_prior if choices is None and shares_noise else None
        self.drafting = TreeDrafting(head, self.pool, self.attention, self.kernels.fused, prior)
        self.graphs: DraftGraphs | None = None

    @property
    def num_granted_pages(self) -> int:
        """Pages held by live requests, for leak checks."""
        return sum(request.pages.num_pages for request in self._requests.values())

    def update_requests(self, plan: StepPlan) -> None:
        """Apply a plan's deltas; call once per plan, before `draft`."""
        for request_id in plan.finished:
            self._requests.pop(request_id, None)
        for new in plan.new:
            self._requests[new.request_id] = DraftRequest(
                new.prompt_ids, new.sampling, PageTable(self.layout, self.device)
            )
        for request_id, pages in plan.new_pages.items():
            self._requests[request_id].pages.append(pages)

    @torch.inference_mode()
    def extend(self, runs: list[AcceptedRun], features: Tensor) -> None:
        """Cover the positions a step committed.

        Args:
            features: true target features, run by run, `[sum of num_committed, F]`. The pair of position i takes
                token i + 1: the next prompt token within a prompt (also at the tail of a chunk), else the accepted
                ones.
        """
        live = [run for run in runs if run.request_id in self._requests]
        if not live:
            return
        token_ids: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        first = 0
        for run in runs:
            request = self._requests.get(run.request_id)
            if request is not None:
                stop = run.start + run.num_committed
                token_ids += (request.prompt_ids[run.start + 1 : stop + 1] + run.tokens)[: run.num_committed]
                positions += range(run.start, stop)
                kept += range(first, first + run.num_committed)
            first += run.num_committed
        if len(live) != len(runs):
            features = features[torch.tensor(kept, device=features.device)]
        states = self.head.extend(
            features.to(self.device),
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self._run_attention(live),
        )
        row = 0
        for run in live:
            row += run.num_committed
            request = self._requests[run.request_id]
            request.num_covered = run.start + run.num_committed
            if run.tokens:
                request.root = run.tokens[-1]
                request.state = states[row - 1]

    def _run_attention(self, runs: list[AcceptedRun]) -> Attention:
        if self.pool is None or self.attention is None:
            return no_attention
        tables = [self._requests[run.request_id].pages for run in runs]
        slots = [table.range(run.start, run.start + run.num_committed) for table, run in zip(tables, runs, strict=True)]
        rows = causal_rows([run.start for run in runs], [run.num_committed for run in runs], page_table(tables))
        group = AttentionGroup(sum(run.num_committed for run in runs), self.attention.plan(rows))
        return PagedAttention(self.pool, torch.cat(slots), [group], self.kernels.fused)

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> dict[int, tuple[list[int], list[int]]]:
        """Grow a tree for every request that has a node budget above 1; returns (tokens, parents) per request id."""
        depth = plan.draft_depth if self.head.max_depth is None else min(plan.draft_depth, self.head.max_depth)
        items = [item for item in plan.decode if item.num_nodes > 1]
        if not items or depth < 1:
            return {}
        requests = [self._requests[item.request_id] for item in items]
        budgets = [item.num_nodes for item in items]
        if self.graphs is not None:
            trees = self.graphs.draft([item.request_id for item in items], requests, budgets)
        else:
            growth = self.new_growth(plan.width, depth)
            depth = depth if self._choices is None else min(depth, self._choices.depth)
            self.drafting.grow(growth, self._inputs(requests), depth, self._rankers(requests))
            roots = torch.tensor([request.root for request in requests], device=self.device)
            trees = growth.finish(roots, torch.tensor(budgets, device=self.device))
        tokens, parents, counts = trees.tokens.tolist(), trees.parents.tolist(), trees.num_nodes.tolist()
        return {
            item.request_id: (tokens[row][: counts[row]], parents[row][: counts[row]]) for row, item in enumerate(items)
        }

    def new_growth(self, width: int, depth: int) -> TreeGrowth | StaticGrowth:
        """An empty growth of the shape in use, cut to `depth` levels."""
        if self._choices is None:
            return TreeGrowth(min(width, self.head.max_candidates), self.kernels.grow)
        return StaticGrowth(self._choices.truncated(depth))

    def record_graphs(self, limits: GraphLimits, recorder: Recorder, on_progress: Progress = no_progress) -> None:
        """Record whole drafts of the shape in `limits`; from then on every draft is replayed."""
        depth = limits.draft_depth if self.head.max_depth is None else min(limits.draft_depth, self.head.max_depth)
        if self._choices is None:
            num_drafted = min(limits.width, self.head.max_candidates) * (depth - 1)
            shape = DraftShape(partial(self.new_growth, limits.width, depth), depth, num_drafted)
        else:
            choices = self._choices.truncated(depth)
            indices = ShapeIndices.of(choices, self.device)
            shape = DraftShape(partial(StaticGrowth, choices, indices), choices.depth, choices.num_expanded)
        graphs = DraftGraphs(
            self.drafting, shape, self.kernels.perturb, self._shares_noise, limits, recorder, self.layout.scratch_page
        )
        graphs.record(on_progress)
        self.graphs = graphs

    def _rankers(self, requests: list[DraftRequest]) -> HostRankers:
        return HostRankers(
            params=[request.sampling if self._shares_noise else SamplingParams() for request in requests],
            covered=[request.num_covered for request in requests],
        )

    def _inputs(self, requests: list[DraftRequest]) -> DraftInputs:
        covered = [request.num_covered for request in requests]
        return DraftInputs(
            states=stacked_states([request.state for request in requests]),
            covered=torch.tensor(covered, device=self.device),
            page_table=page_table([request.pages for request in requests]),
            max_covered=max(covered),
        )
