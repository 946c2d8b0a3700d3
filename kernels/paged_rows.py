"""The query rows of one attention call over a paged cache, and what each of them sees.

One form serves all three uses: the nodes of draft trees under verification, the levels of a draft, prompt chunks.

Letters: B requests, T rows of all of them, N rows of a request, K keys of a block, W words, P pages of a request,
L keys of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Ragged rows of a batch of requests.

    Request b owns rows `row_starts[b]` … `row_starts[b + 1] - 1`. Each of them sees the keys of cache places
    0 … `prefix_lengths[b] - 1`, and of the request's *block*, the `block_lengths[b]` places after those, the ones its
    mask row names. Place p lives in slot `page_table[b, p // page_size] * page_size + p % page_size`.

    Args:
        row_starts: int32 `[B + 1]`; equal neighbours make a request without rows, as padding requests are.
        prefix_lengths, block_lengths: int32 `[B]`.
        page_table: int32 `[B, P]`; entries past a request's last page may be any valid page.
        mask: ancestor mask of the blocks in the encoding the backend declares, rows padded to `max_rows`: FULL bool
            `[B, N, L]`, TREE_ONLY bool `[B, N, K]`, PACKED `[B, N, W]`. None means causal: row j of a request sees
            places 0 … j of its block, which has as many places as the request has rows.
        max_rows, max_block, max_prefix: bounds of rows, block and prefix over the requests, known to the host; they
            size the launch and may be larger than the largest.
        query_positions: text position of each row, int64 `[T]`; only windows read it.
        key_positions: text position of each place of the blocks, int64 `[B, K]`; only windows read it.
    """

    row_starts: Tensor
    prefix_lengths: Tensor
    block_lengths: Tensor
    page_table: Tensor
    mask: Tensor | None
    max_rows: int
    max_block: int
    max_prefix: int
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return int(self.prefix_lengths.shape[0])
