"""The target side of a step: one forward pass over prompt chunks and draft trees, then verify, accept, compact.

A plain class: it knows nothing of Ray or sockets. Every tensor-parallel rank runs one; rank 0 alone chooses tokens and
broadcasts them, so that ranks cannot diverge.

Letters: T rows of the step, B decoding requests, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eyas.kernels.verify import AcceptedPaths
from eyas.models.decoder import Decoder
from eyas.models.layers import use_operations
from eyas.workers.buckets import GraphLimits
from eyas.workers.graphs import Progress, Recorder, no_progress
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout, page_table
from eyas.workers.messages import AcceptedRun, DecodeItem, StepPlan
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, causal_rows
from eyas.workers.sampler import RowSampling, choose_tokens
from eyas.workers.sampling import SamplingParams
from eyas.workers.step_backends import StepBackends
from eyas.workers.step_rows import ScoredRows, StepRows
from eyas.workers.tree_batch import TreeBatch
from eyas.workers.tree_verification import TreeVerification
from eyas.workers.verify_graphs import VerifyGraphs, VerifyRequest

_NOT_FINITE = "the model produced logits that are not finite (NaN or infinity)"


@dataclass(slots=True)
class TargetRequest:
    """One request's state on a target rank.

    Args:
        num_committed: positions 0 … num_committed - 1 have final KV.
        root: the newest token, whose KV the next verify writes; None until the prompt is through.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    pages: PageTable
    num_committed: int = 0
    root: int | None = None


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What a step produced on this rank.

    Args:
        runs: accepted tokens per request, prompt chunks included.
        features: target features of the committed rows, run by run, `[sum of num_committed, A * H]`; None without
            capture or rows.
        errors: requests whose logits are not finite.
    """

    runs: list[AcceptedRun]
    features: Tensor | None
    errors: dict[int, str]


class TargetRunner:
    """Executes step plans on one rank."""

    def __init__(
        self, model: Decoder, layout: PoolLayout, capture: tuple[int, ...], backends: StepBackends | None = None
    ) -> None:
        """Args:
        capture: states to publish for the draft head, see `Decoder`; empty without speculation.
        backends: None computes with the reference.
        """
        config = model.config
        backends = backends or StepBackends()
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.capture = capture
        self.layout = layout
        kv_heads = config.num_kv_heads // model.parallel.size
        self.pool = KVPool(
            layout, config.num_layers, kv_heads, config.head_dim, self.dtype, self.device, config.value_head_dim
        )
        self.kernels = backends.kernels
        if isinstance(model, nn.Module):
            use_operations(model, self.kernels.fused)
        self.attention = backends.attention(self.pool.geometry(config.num_heads // model.parallel.size))
        self.graphs: VerifyGraphs | None = None
        self._requests: dict[int, TargetRequest] = {}

    @property
    def num_granted_pages(self) -> int:
        """Pages held by live requests, for leak checks."""
        return sum(request.pages.num_pages for request in self._requests.values())

    def record_graphs(self, limits: GraphLimits, recorder: Recorder, on_progress: Progress = no_progress) -> None:
        """Record the decode steps within `limits`; from then on steps without prompt chunks are replayed.

        Call it when `capture` is settled. All ranks must call it alike.
        """
        verification = TreeVerification(self.model, self.pool, self.attention, self.kernels, limits.draft_depth)
        graphs = VerifyGraphs(verification, self.capture, limits, recorder)
        graphs.record(on_progress)
        self.graphs = graphs

    @torch.inference_mode()
    def step(self, plan: StepPlan, trees: dict[int, tuple[list[int], list[int]]]) -> VerifiedStep:
        """Verify the trees and run the prompt chunks of `plan`.

        Args:
            trees: request id to (tokens, parents) of the requests that draft; the others verify their root alone.
        """
        self._update_requests(plan)
        if not plan.decode and not plan.prefill:
            return VerifiedStep(runs=[], features=None, errors={})
        if self.graphs is not None and not plan.prefill:
            return self._replay(self.graphs, plan.decode, trees)
        rows = StepRows()
        batch = self._add_trees(plan, trees, rows) if plan.decode else None
        chunk_rows = self._add_chunks(plan, rows) if plan.prefill else []
        output = self.model(
            torch.tensor(rows.token_ids, device=self.device),
            torch.tensor(rows.positions, device=self.device),
            PagedAttention(self.pool, torch.cat(rows.slots), rows.groups, self.kernels.fused),
            self.capture,
        )
        runs: list[AcceptedRun] = []
        kept_rows: list[Tensor] = []
        errors: dict[int, str] = {}
        scored = self._scored_rows(plan, batch, chunk_rows)
        chosen = self._choose(output.hidden, scored, errors)
        if batch is not None:
            accepted = self.kernels.verify_walk(
                batch.trees, batch.layout.links, chosen[: batch.num_rows][batch.row_index], plan.draft_depth
            )
            for index, item in enumerate(plan.decode):
                runs.append(self._commit_path(item.request_id, batch, accepted, index))
                path = accepted.path[index, : int(accepted.num_accepted[index]) + 1]
                kept_rows.append(batch.row_index[index, path])
            self._compact_paths(runs, batch, accepted)
        next_scored = 0 if batch is None else batch.num_rows
        for chunk, first in zip(plan.prefill, chunk_rows, strict=True):
            ends_prompt = self._ends_prompt(chunk.request_id, chunk.length)
            runs.append(
                self._commit_chunk(chunk.request_id, chunk.length, chosen, next_scored if ends_prompt else None)
            )
            next_scored += ends_prompt
            kept_rows.append(torch.arange(first, first + chunk.length, device=self.device))
        features = output.features[torch.cat(kept_rows)] if output.features is not None else None
        return VerifiedStep(runs=runs, features=features, errors=errors)

    def _update_requests(self, plan: StepPlan) -> None:
        for request_id in plan.finished:
            self._requests.pop(request_id, None)
        for new in plan.new:
            self._requests[new.request_id] = TargetRequest(
                new.prompt_ids, new.sampling, PageTable(self.layout, self.device)
            )
        for request_id, pages in plan.new_pages.items():
            self._requests[request_id].pages.append(pages)

    def _replay(
        self, graphs: VerifyGraphs, decode: list[DecodeItem], trees: dict[int, tuple[list[int], list[int]]]
    ) -> VerifiedStep:
        """The step of decoding requests alone, from a recorded graph."""
        requests = [self._requests[item.request_id] for item in decode]
        outcome = graphs.verify(
            [
                VerifyRequest(
                    item.request_id, *_tree_of(item, request, trees), request.num_committed, request.pages,
                    request.sampling,
                )
                for item, request in zip(decode, requests, strict=True)
            ]
        )  # fmt: skip
        runs = []
        for item, request, tokens in zip(decode, requests, outcome.tokens, strict=True):
            runs.append(AcceptedRun(item.request_id, request.num_committed, len(tokens), tokens))
            request.num_committed += len(tokens)
            request.root = tokens[-1]
        errors = {decode[row].request_id: _NOT_FINITE for row in outcome.not_finite}
        return VerifiedStep(runs, outcome.features, errors)

    def _add_trees(self, plan: StepPlan, trees: dict[int, tuple[list[int], list[int]]], rows: StepRows) -> TreeBatch:
        """Lay out the trees of all decoding requests as the first rows of the step and as one group."""
        requests = [self._requests[item.request_id] for item in plan.decode]
        drafted = [_tree_of(item, request, trees) for item, request in zip(plan.decode, requests, strict=True)]
        batch = TreeBatch.build(
            drafted, [request.num_committed for request in requests], self.attention.mask_encoding, self.device,
            self.kernels,
        )  # fmt: skip
        for request, (tokens, _), next_positions in zip(requests, drafted, batch.token_positions, strict=True):
            committed, positions = request.num_committed, [position - 1 for position in next_positions]
            rows.add(tokens, positions, request.pages.range(committed, committed + len(tokens)))
        # Native layers have no windows, the only readers of positions.
        paged_rows = batch.paged_rows(
            page_table([request.pages for request in requests]), not self.model.config.is_native
        )
        rows.groups.append(AttentionGroup(batch.num_rows, self.attention.plan(paged_rows)))
        return batch

    def _add_chunks(self, plan: StepPlan, rows: StepRows) -> list[int]:
        """Lay out the next prompt rows of every prefilling request as one group; returns each chunk's first row."""
        firsts, starts, lengths, tables = [], [], [], []
        for chunk in plan.prefill:
            request = self._requests[chunk.request_id]
            start, stop = request.num_committed, request.num_committed + chunk.length
            slots = request.pages.range(start, stop)
            firsts.append(rows.add(request.prompt_ids[start:stop], list(range(start, stop)), slots))
            starts.append(start)
            lengths.append(chunk.length)
            tables.append(request.pages)
        attend = self.attention.plan(causal_rows(starts, lengths, page_table(tables)))
        rows.groups.append(AttentionGroup(sum(lengths), attend))
        return firsts

    def _ends_prompt(self, request_id: int, length: int) -> bool:
        request = self._requests[request_id]
        return request.num_committed + length == len(request.prompt_ids)

    def _scored_rows(self, plan: StepPlan, batch: TreeBatch | None, chunk_rows: list[int]) -> ScoredRows:
        """Rows whose next token matters: every tree node, and the last row of each chunk that ends its prompt."""
        index: list[int] = []
        owners: list[int] = []
        positions: list[int] = []
        if batch is not None:
            index += range(batch.num_rows)
            for row, item in enumerate(plan.decode):
                own = batch.token_positions[row]
                owners += [item.request_id] * len(own)
                positions += own
        for chunk, first in zip(plan.prefill, chunk_rows, strict=True):
            if self._ends_prompt(chunk.request_id, chunk.length):
                index.append(first + chunk.length - 1)
                owners.append(chunk.request_id)
                positions.append(self._requests[chunk.request_id].num_committed + chunk.length)
        return ScoredRows(index, owners, positions)

    def _choose(self, hidden: Tensor, scored: ScoredRows, errors: dict[int, str]) -> Tensor:
        """The target's token after each scored row; decided by rank 0, equal on all ranks."""
        if not scored.index:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if len(scored.index) != hidden.shape[0]:
            hidden = hidden[torch.tensor(scored.index, device=self.device)]
        logits = self.model.logits(hidden)
        parallel = self.model.parallel
        chosen = torch.empty(len(scored.index), dtype=torch.int64, device=self.device)
        if parallel.rank == 0:
            best = logits.max(dim=-1)  # NaN wins every comparison, so one reduction also finds it
            chosen = best.indices
            is_finite = torch.isfinite(best.values)
            if not bool(is_finite.all()):
                for row in (~is_finite).nonzero().flatten().tolist():
                    errors[scored.owners[row]] = _NOT_FINITE
                logits = logits.nan_to_num(0.0)
            params = [self._requests[owner].sampling for owner in scored.owners]
            if any(each.temperature > 0 for each in params):
                chosen = choose_tokens(logits, RowSampling(params, scored.positions))
        return parallel.broadcast(chosen, len(scored.index))

    def _commit_path(self, request_id: int, batch: TreeBatch, accepted: AcceptedPaths, row: int) -> AcceptedRun:
        request = self._requests[request_id]
        tokens = accepted.emitted_tokens(batch.trees, row)
        run = AcceptedRun(request_id, request.num_committed, len(tokens), tokens)
        request.num_committed += len(tokens)
        request.root = tokens[-1]
        return run

    def _compact_paths(self, runs: list[AcceptedRun], batch: TreeBatch, accepted: AcceptedPaths) -> None:
        """Move every accepted path's KV to the front of its request's tree block, all layers at once."""
        sources, destinations = [], []
        for row, run in enumerate(runs):
            pages = self._requests[run.request_id].pages
            path = accepted.path[row, : run.num_committed]
            block = pages.range(run.start, run.start + len(batch.token_positions[row]))
            sources.append(block[path])
            destinations.append(block[: run.num_committed])
        source_slots, destination_slots = (
            pad_sequence(slots, batch_first=True, padding_value=-1) for slots in (sources, destinations)
        )
        for block in self.pool.blocks:
            self.kernels.compact(block, source_slots, destination_slots)

    def _commit_chunk(self, request_id: int, length: int, chosen: Tensor, scored: int | None) -> AcceptedRun:
        """Commit prompt rows; `scored` is the index in `chosen` of the prompt's last row, None before the end."""
        request = self._requests[request_id]
        tokens = [] if scored is None else [int(chosen[scored])]
        run = AcceptedRun(request_id, request.num_committed, length, tokens)
        request.num_committed += length
        if tokens:
            request.root = tokens[0]
        return run


def _tree_of(
    item: DecodeItem, request: TargetRequest, trees: dict[int, tuple[list[int], list[int]]]
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a request's tree; the root alone where none was drafted."""
    drafted = trees.get(item.request_id)
    if drafted is not None:
        return drafted
    if request.root is None:
        raise RuntimeError("a request cannot decode before its prompt is through")
    return [request.root], [-1]
