"""The device work of a decode step, from tensors alone: forward, choose, walk, compact.

Two halves, recorded apart: the forward pass, and everything after it, of which there is a second form for steps in
which some request narrows its distribution to a nucleus. Nothing is read on the host.

Letters: T rows, B requests, N nodes, A = draft depth + 1, P pages of a request, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.kernels.attention_backend import AttentionBackend
from eyas.kernels.build import MaskEncoding, TreeLayout
from eyas.kernels.kernel_set import KernelSet
from eyas.kernels.paged_rows import PagedRows
from eyas.kernels.sample import nucleus, single_temperatures
from eyas.kernels.tree import DraftTrees
from eyas.models.decoder import Decoder
from eyas.workers.kv_pool import KVPool
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, slots_at

NUM_RESULTS = 4  # columns after an accepted path: tokens accepted, bonus token, finite, tree


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """Trees of a batch, flat and padded. Request B, one past the last, is where padding rows belong.

    Args:
        tokens, requests, nodes: token of each row, its request and its node there, int64 `[T]`.
        parents: int64 `[B, N]`, padding -2.
        num_nodes: int64 `[B]`, 0 for padding requests.
        committed, seeds: int64 `[B + 1]`.
        temperatures, top_p: float64 `[B + 1]`.
        page_table: int32 `[B + 1, P]`; padding requests have the scratch page.
    """

    tokens: Tensor
    requests: Tensor
    nodes: Tensor
    parents: Tensor
    num_nodes: Tensor
    committed: Tensor
    seeds: Tensor
    temperatures: Tensor
    top_p: Tensor
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What the second half needs of the first.

    Args:
        positions: of each row, int64 `[T]`.
    """

    layout: TreeLayout
    positions: Tensor
    row_starts: Tensor
    hidden: Tensor
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class TreeVerification:
    """A target with what it verifies on."""

    model: Decoder
    pool: KVPool
    attention: AttentionBackend
    kernels: KernelSet
    draft_depth: int

    def forward(self, inputs: VerifyInputs, capture: tuple[int, ...]) -> ForwardPass:
        """One pass of the target over all rows."""
        batch, max_nodes = inputs.parents.shape
        page_size = self.pool.layout.page_size
        num_places = inputs.page_table.shape[1] * page_size
        encoding = self.attention.mask_encoding
        committed = inputs.committed[:batch]
        layout = self.kernels.build_layout(
            inputs.parents, inputs.num_nodes, committed, encoding,
            num_places if encoding is MaskEncoding.FULL else None,
        )  # fmt: skip
        row_starts = F.pad(torch.cumsum(inputs.num_nodes, dim=0), (1, 0))
        positions = F.pad(layout.positions, (0, 0, 0, 1))[inputs.requests, inputs.nodes]
        places = inputs.committed[inputs.requests] + inputs.nodes
        pages = inputs.page_table[inputs.requests, places // page_size]
        slots = pages * page_size + places % page_size
        rows = PagedRows(
            row_starts=row_starts.to(torch.int32),
            prefix_lengths=committed.to(torch.int32),
            block_lengths=inputs.num_nodes.to(torch.int32),
            page_table=inputs.page_table[:batch],
            mask=layout.mask,
            max_rows=max_nodes,
            max_block=max_nodes,
            max_prefix=num_places - max_nodes,
            query_positions=positions,
            key_positions=layout.positions,
        )
        attend = self.attention.plan(rows)
        attention = PagedAttention(
            self.pool, slots, [AttentionGroup(inputs.tokens.numel(), attend)], self.kernels.fused
        )
        output = self.model(inputs.tokens, positions, attention, capture)
        return ForwardPass(layout, positions, row_starts, output.hidden, output.features)

    def accept(self, inputs: VerifyInputs, passed: ForwardPass, has_nucleus: bool) -> Tensor:
        """Choose tokens, walk, move the accepted KV; returns int64 `[B, A + NUM_RESULTS]`.

        Columns: the path, -1 after its end; tokens accepted; bonus token; 1 if the request's logits are finite; 1 if
        its parents describe a tree.
        """
        batch, max_nodes = inputs.parents.shape
        num_rows = inputs.tokens.numel()
        chosen, is_finite = self._choose(inputs, passed, has_nucleus)
        nodes = torch.arange(max_nodes, device=chosen.device)
        is_real = nodes < inputs.num_nodes[:, None]
        row_index = (passed.row_starts[:-1, None] + nodes).clamp(max=num_rows - 1)
        trees = DraftTrees(
            tokens=inputs.tokens[row_index].masked_fill(~is_real, 0),
            parents=inputs.parents,
            num_nodes=inputs.num_nodes,
        )
        accepted = self.kernels.verify_walk(trees, passed.layout.links, chosen[row_index], self.draft_depth)
        self._compact(inputs, accepted.path)
        finite = (is_finite[row_index] | ~is_real).all(dim=1)
        results = torch.stack([accepted.num_accepted, accepted.bonus_tokens, finite, passed.layout.is_tree], dim=1)
        return torch.cat([accepted.path, results], dim=1)

    def _choose(self, inputs: VerifyInputs, passed: ForwardPass, has_nucleus: bool) -> tuple[Tensor, Tensor]:
        """The target's token after each row, decided by rank 0 and broadcast at the bucket's width."""
        logits = self.model.logits(passed.hidden)
        parallel = self.model.parallel
        num_rows = inputs.tokens.numel()
        if parallel.rank == 0:
            temperatures = single_temperatures(inputs.temperatures[inputs.requests])
            if has_nucleus:
                logits = _narrowed(logits, temperatures, inputs.top_p[inputs.requests])
            sampled = self.kernels.sample_tokens(
                logits, temperatures, inputs.seeds[inputs.requests], passed.positions + 1
            )
            chosen, is_finite = sampled.tokens, sampled.is_finite
        else:
            chosen = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
            is_finite = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
        return parallel.broadcast(chosen, num_rows), is_finite

    def _compact(self, inputs: VerifyInputs, path: Tensor) -> None:
        """Move the path's keys and values to the front of each request's block."""
        batch = path.shape[0]
        committed, table = inputs.committed[:batch, None], inputs.page_table[:batch]
        page_size, length = self.pool.layout.page_size, path.shape[1]
        moves = (path >= 0) & (inputs.num_nodes > 0)[:, None]
        fronts = committed + torch.arange(length, device=path.device)
        sources = slots_at(table, committed + path.clamp(min=0), page_size)
        # Past the path's end the front may lie beyond the request's pages, and beyond the table.
        destinations = slots_at(table, torch.where(moves, fronts, 0), page_size)
        sources, destinations = sources.masked_fill(~moves, -1), destinations.masked_fill(~moves, -1)
        for block in self.pool.blocks:
            self.kernels.compact(block, sources, destinations)


def _narrowed(logits: Tensor, temperatures: Tensor, top_p: Tensor) -> Tensor:
    """Logits with all outside each sampled row's nucleus at -inf; the nucleus is taken at the row's temperature."""
    divisors = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    scaled = logits.float() / divisors
    kept = nucleus(scaled, torch.where(temperatures > 0, top_p, 1.0).float())
    return logits.float().masked_fill(torch.isneginf(kept) & ~torch.isneginf(scaled), -torch.inf)
