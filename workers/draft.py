"""The drafter's side of a step: extend over what was accepted, grow a tree, hand it over.

A plain class: it knows nothing of Ray or sockets. Invariant when a tree is grown: the draft KV covers exactly positions
0 … n - 1, each from (true target feature i, token i + 1), never from the head's own guesses; drafted rows are written
above n and overwritten by the next `extend`.

Letters: T rows, B requests, W candidates per parent, E nodes of a level to be extended, S width of a head's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.kernels.static_tree import StaticGrowth, TreeChoices
from eyas.models.attention import Attention, no_attention
from eyas.models.head import Candidates, DraftHead
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout
from eyas.workers.level_attention import LevelAttention
from eyas.workers.messages import AcceptedRun, StepPlan
from eyas.workers.sampler import NoiseRanker, RowSampling
from eyas.workers.sampling import SamplingParams
from eyas.workers.segments import PagedAttention, Segment, causal_segment


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
        self, head: DraftHead, layout: PoolLayout, shares_noise: bool = True, choices: TreeChoices | None = None
    ) -> None:
        """Args:
        shares_noise: rank candidates under the target's own noise; False is plain top-k, kept for comparison.
        choices: shape of every tree; None grows it from the scores.

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
        kept: list[Tensor] = []
        first = 0
        for run in runs:
            request = self._requests.get(run.request_id)
            if request is not None:
                stop = run.start + run.num_committed
                token_ids += (request.prompt_ids[run.start + 1 : stop + 1] + run.tokens)[: run.num_committed]
                positions += range(run.start, stop)
                kept.append(torch.arange(first, first + run.num_committed))
            first += run.num_committed
        if len(live) != len(runs):
            features = features[torch.cat(kept)]
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
        cache = self.head.cache
        if self.pool is None or cache is None:
            return no_attention
        slots: list[Tensor] = []
        segments: list[Segment] = []
        row = 0
        for run in runs:
            keys = self._requests[run.request_id].pages.range(0, run.start + run.num_committed)
            rows = torch.arange(row, row + run.num_committed, device=self.device)
            slots.append(keys[run.start :])
            segments.append(causal_segment(rows, keys, run.start, cache.group, self.dtype))
            row += run.num_committed
        return PagedAttention(self.pool, torch.cat(slots), segments)

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> dict[int, tuple[list[int], list[int]]]:
        """Grow a tree for every request that has a node budget above 1; returns (tokens, parents) per request id."""
        depth = plan.draft_depth if self.head.max_depth is None else min(plan.draft_depth, self.head.max_depth)
        items = [item for item in plan.decode if item.num_nodes > 1]
        if not items or depth < 1:
            return {}
        requests = [self._requests[item.request_id] for item in items]
        growth: TreeGrowth | StaticGrowth
        if self._choices is None:
            growth = TreeGrowth(min(plan.width, self.head.max_candidates))
        else:
            choices = self._choices.truncated(depth)
            growth, depth = StaticGrowth(choices), choices.depth
        if self.head.is_path_dependent:
            self._grow_paths(growth, requests, depth)
        else:
            self._grow_product(growth, requests, depth)
        roots = torch.tensor([request.root for request in requests], device=self.device)
        budgets = torch.tensor([item.num_nodes for item in items], device=self.device)
        trees = growth.finish(roots, budgets)
        tokens, parents, counts = trees.tokens.tolist(), trees.parents.tolist(), trees.num_nodes.tolist()
        return {
            item.request_id: (tokens[row][: counts[row]], parents[row][: counts[row]]) for row, item in enumerate(items)
        }

    def _grow_paths(self, growth: TreeGrowth | StaticGrowth, requests: list[DraftRequest], depth: int) -> None:
        """Level by level: the head reads what the level above chose."""
        batch = len(requests)
        states = torch.stack([_state_of(request) for request in requests])[:, None]  # [B, 1, S]
        levels = LevelAttention(
            self.head, self.pool, [request.pages for request in requests], [request.num_covered for request in requests]
        )
        for level in range(1, depth + 1):
            width = growth.num_candidates(level)
            ranked = self._rank(states.flatten(0, 1), requests, range(level, level + 1), width, states.shape[1])
            tokens, log_probs = (x.view(batch, -1, width) for x in (ranked.tokens, ranked.log_probs))
            frontier = growth.start(tokens[:, 0], log_probs[:, 0]) if level == 1 else growth.expand(tokens, log_probs)
            if level < depth:
                ranks = frontier.parent_ranks
                parent_states = states.gather(1, ranks[:, :, None].expand(-1, -1, states.shape[2]))
                states = levels.step(parent_states, frontier.tokens, ranks)  # [B, E, S]

    def _grow_product(self, growth: TreeGrowth | StaticGrowth, requests: list[DraftRequest], depth: int) -> None:
        """All levels from one call: a level's candidates are the same under every node of the level above."""
        states = torch.stack([_state_of(request) for request in requests])
        widths = [growth.num_candidates(level) for level in range(1, depth + 1)]
        ranked = self._rank(states, requests, range(1, depth + 1), max(widths), 1)
        tokens, log_probs = (x.view(len(requests), depth, -1) for x in (ranked.tokens, ranked.log_probs))
        frontier = growth.start(tokens[:, 0, : widths[0]], log_probs[:, 0, : widths[0]])
        for level in range(1, depth):
            shape = (-1, frontier.tokens.shape[1], widths[level])
            frontier = growth.expand(
                tokens[:, level, None, : widths[level]].expand(shape),
                log_probs[:, level, None, : widths[level]].expand(shape),
            )

    def _rank(
        self, states: Tensor, requests: list[DraftRequest], levels: range, width: int, rows_each: int
    ) -> Candidates:
        """Candidates at `levels` below the roots, from `rows_each` states per request."""
        rows = RowSampling(
            params=[self._ranking_params(request) for request in requests for _ in range(rows_each * len(levels))],
            positions=[
                request.num_covered + level for request in requests for _ in range(rows_each) for level in levels
            ],
        )
        return self.head.candidates(states, levels, NoiseRanker(rows, width))

    def _ranking_params(self, request: DraftRequest) -> SamplingParams:
        return request.sampling if self._shares_noise else SamplingParams()


def _state_of(request: DraftRequest) -> Tensor:
    if request.state is None:
        raise RuntimeError("a request cannot draft before its prompt is through")
    return request.state
