"""The drafter's side of a step: extend over what was accepted, grow a tree, hand it over.

A plain class: it knows nothing of Ray or sockets. Invariant when a tree is grown: the draft KV covers exactly positions
0 … n - 1, each from (true target feature i, token i + 1), never from the head's own guesses; drafted rows are written
above n and overwritten by the next `extend`.

Letters: T rows, B requests, W width, K keys of a request's tree block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.grow import TreeGrowth
from eyas.models.eagle3 import Eagle3Head
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout
from eyas.workers.messages import AcceptedRun, StepPlan
from eyas.workers.sampler import Candidates, RowSampling, rank_candidates
from eyas.workers.sampling import SamplingParams
from eyas.workers.segments import PagedAttention, Segment, causal_segment


@dataclass(slots=True)
class DraftRequest:
    """One request's state on the drafter.

    Args:
        num_covered: positions 0 … num_covered - 1 have draft KV from true target features.
        root: the newest token of the text.
        state: the head's state after the newest pair, `[H]`; None until the prompt is through.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    pages: PageTable
    num_covered: int = 0
    root: int = -1
    state: Tensor | None = None


class DraftRunner:
    """Executes the drafting part of step plans."""

    def __init__(self, head: Eagle3Head, layout: PoolLayout, shares_noise: bool = True) -> None:
        """Args:
        shares_noise: rank candidates under the target's own noise; False is plain top-k, kept for comparison.
        """
        config = head.config
        self._shares_noise = shares_noise
        self.head = head
        self.device = head.embedding.device
        self.dtype = head.embedding.dtype
        self.layout = layout
        self.pool = KVPool(layout, 1, config.num_kv_heads, config.head_dim, self.dtype, self.device)
        self._group = config.num_heads // config.num_kv_heads
        self._requests: dict[int, DraftRequest] = {}

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
            features: true target features, run by run, `[sum of num_committed, A * H]`. The pair of position i takes
                token i + 1: the next prompt token within a prompt (also at the tail of a chunk), else the accepted
                ones.
        """
        live = [run for run in runs if run.request_id in self._requests]
        if not live:
            return
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[Tensor] = []
        segments: list[Segment] = []
        kept: list[Tensor] = []
        last_rows: list[int] = []
        first = 0
        for run in runs:
            count = run.num_committed
            request = self._requests.get(run.request_id)
            if request is not None:
                row = len(token_ids)
                stop = run.start + count
                following = (request.prompt_ids[run.start + 1 : stop + 1] + run.tokens)[:count]
                token_ids += following
                positions += range(run.start, stop)
                keys = request.pages.range(0, stop)
                slots.append(keys[run.start :])
                rows = torch.arange(row, row + count, device=self.device)
                segments.append(causal_segment(rows, keys, run.start, self._group, self.dtype))
                kept.append(torch.arange(first, first + count))
                last_rows.append(row + count - 1)
            first += count
        if len(live) != len(runs):
            features = features[torch.cat(kept)]
        states = self.head.extend(
            features.to(self.device),
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            PagedAttention(self.pool, torch.cat(slots), segments),
        )
        for run, last in zip(live, last_rows, strict=True):
            request = self._requests[run.request_id]
            request.num_covered = run.start + run.num_committed
            if run.tokens:
                request.root = run.tokens[-1]
                request.state = states[last]

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> dict[int, tuple[list[int], list[int]]]:
        """Grow a tree for every request that has a node budget above 1; returns (tokens, parents) per request id."""
        items = [item for item in plan.decode if item.num_nodes > 1]
        if not items or plan.draft_depth < 1:
            return {}
        requests = [self._requests[item.request_id] for item in items]
        width = min(plan.width, self.head.config.draft_vocab_size)
        growth = TreeGrowth(width)
        states = torch.stack([_state_of(request) for request in requests])  # [B, H]
        first = self._rank(states, requests, depth=1, width=width, rows_each=1)
        frontier = growth.start(first.tokens, first.log_probs)
        parent_states = states[:, None].expand(-1, width, -1)
        levels = _LevelAttention(self, requests, width)
        for depth in range(2, plan.draft_depth + 1):
            states = levels.step(self.head, parent_states, frontier.tokens, frontier.parent_ranks)  # [B, W, H]
            ranked = self._rank(states.flatten(0, 1), requests, depth=depth, width=width, rows_each=width)
            shape = (len(requests), width, width)
            frontier = growth.expand(ranked.tokens.view(shape), ranked.log_probs.view(shape))
            parent_states = states.gather(1, frontier.parent_ranks[:, :, None].expand_as(states))
        roots = torch.tensor([request.root for request in requests], device=self.device)
        budgets = torch.tensor([item.num_nodes for item in items], device=self.device)
        trees = growth.finish(roots, budgets)
        tokens, parents, counts = trees.tokens.tolist(), trees.parents.tolist(), trees.num_nodes.tolist()
        return {
            item.request_id: (tokens[row][: counts[row]], parents[row][: counts[row]]) for row, item in enumerate(items)
        }

    def _rank(self, states: Tensor, requests: list[DraftRequest], depth: int, width: int, rows_each: int) -> Candidates:
        """Candidates for the level `depth` below the roots, from `rows_each` parent states per request."""
        rows = RowSampling(
            params=[self._ranking_params(request) for request in requests for _ in range(rows_each)],
            positions=[request.num_covered + depth for request in requests for _ in range(rows_each)],
        )
        return rank_candidates(self.head.logits(states), rows, self.head.candidate_ids, width)

    def _ranking_params(self, request: DraftRequest) -> SamplingParams:
        return request.sampling if self._shares_noise else SamplingParams()


class _LevelAttention:
    """Keys of the drafted levels of one draft: level d of a request occupies rows (d - 1) W … d W - 1 of its block."""

    def __init__(self, runner: DraftRunner, requests: list[DraftRequest], width: int) -> None:
        self._runner = runner
        self._requests = requests
        self._width = width
        self._num_levels = 0
        self._ancestors: Tensor | None = None  # bool [B, W, levels * W]

    def step(self, head: Eagle3Head, parent_states: Tensor, tokens: Tensor, parent_ranks: Tensor) -> Tensor:
        """Run the head over one level of survivors `[B, W]`; returns their states `[B, W, H]`."""
        runner, width = self._runner, self._width
        batch = len(self._requests)
        own = torch.eye(width, dtype=torch.bool, device=runner.device).expand(batch, width, width)
        if self._ancestors is None:
            ancestors = own
        else:
            inherited = self._ancestors.gather(1, parent_ranks[:, :, None].expand(-1, -1, self._ancestors.shape[2]))
            ancestors = torch.cat([inherited, own], dim=2)
        self._ancestors = ancestors
        level = self._num_levels
        self._num_levels += 1
        covered = torch.tensor([request.num_covered for request in self._requests], device=runner.device)
        attention = self._attention(covered, ancestors)
        positions = (covered + level)[:, None].expand(-1, width)
        states = head.step(parent_states.flatten(0, 1), tokens.flatten(), positions.flatten(), attention)
        return states.view(batch, width, -1)

    def _attention(self, covered: Tensor, ancestors: Tensor) -> PagedAttention:
        runner, width = self._runner, self._width
        batch, _, block = ancestors.shape
        max_keys = int(covered.max()) + block
        columns = torch.arange(max_keys, device=runner.device) - covered[:, None]  # [B, L]
        in_block = (columns >= 0) & (columns < block)
        visible = ancestors.gather(2, columns.clamp(0, block - 1)[:, None].expand(-1, width, -1))
        mask = (columns < 0)[:, None] | (in_block[:, None] & visible)
        key_slots, row_slots = [], []
        for request in self._requests:
            slots = request.pages.range(0, request.num_covered + block)
            row_slots.append(slots[-width:])
            key_slots.append(torch.nn.functional.pad(slots, (0, max_keys - slots.numel()), value=int(slots[0])))
        rows = torch.arange(batch * width, device=runner.device).view(batch, width)
        segment = Segment.build(rows, None, torch.stack(key_slots), mask, runner._group, runner.dtype)
        return PagedAttention(runner.pool, torch.cat(row_slots), [segment])


def _state_of(request: DraftRequest) -> Tensor:
    if request.state is None:
        raise RuntimeError("a request cannot draft before its prompt is through")
    return request.state
