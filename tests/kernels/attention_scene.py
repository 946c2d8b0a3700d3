"""Steps of attention made up for tests: ragged forests over a poisoned pool, and what each row must see of it.

Letters: B requests, T rows, N rows of a request, K places of a block, W words, L keys, S slots.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.kernels.attention_backend import AttentionGeometry
from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.build import MaskEncoding
from eyas.kernels.paged_rows import PagedRows


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a scene.

    Args:
        prefix: places every row sees.
        parents: parent of each place of the block, `-1` for those that follow the prefix directly.
        num_rows: the last so many places of the block are rows; None: all.
    """

    prefix: int = 0
    parents: list[int] = field(default_factory=list)
    num_rows: int | None = None

    @property
    def rows(self) -> list[int]:
        """Block place of each row."""
        block = len(self.parents)
        return list(range(block - (block if self.num_rows is None else self.num_rows), block))

    def path(self, place: int) -> list[int]:
        """Block places from the prefix down to `place`."""
        parent = self.parents[place]
        return [*self.path(parent), place] if parent >= 0 else [place]


PADDING = Request()


def chain(prefix: int, length: int) -> Request:
    return Request(prefix, list(range(-1, length - 1)))


def random_tree(prefix: int, num_nodes: int, seed: int = 0) -> Request:
    generator = random.Random(seed)
    return Request(prefix, [-1] + [generator.randrange(node) for node in range(1, num_nodes)])


class Scene:
    """A step over a pool in which NaN fills every place that no request owns.

    Attributes:
        query: `[T + spare, Hq, D]`, cut from a fused projection, so not contiguous; spare rows are NaN.
    """

    def __init__(
        self, requests: list[Request], *, page_size: int = 16, group: int = 2, num_kv_heads: int = 2,
        head_dim: int = 16, value_head_dim: int | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", is_causal: bool = False, num_spare_rows: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.requests = requests
        self.is_causal = is_causal
        self.geometry = AttentionGeometry(
            num_kv_heads * group, num_kv_heads, head_dim, value_head_dim or head_dim, page_size, dtype,
            torch.device(device),
        )  # fmt: skip
        self.num_rows = sum(len(request.rows) for request in requests)
        lengths = [request.prefix + len(request.parents) for request in requests]
        self._page_table = self._shuffled_pages(lengths, page_size, seed)
        generator = torch.Generator().manual_seed(seed)
        fused = torch.full((self.num_rows + num_spare_rows, num_kv_heads * (group + 2), head_dim), torch.nan)
        fused[: self.num_rows] = torch.randn(self.num_rows, *fused.shape[1:], generator=generator)
        self.query = fused.to(device, dtype)[:, : num_kv_heads * group]
        num_slots = (sum(-(-length // page_size) for length in lengths) + 1) * page_size
        caches = []
        for width in (head_dim, value_head_dim or head_dim):
            cache = torch.full((num_slots, num_kv_heads, width), torch.nan)
            for index, length in enumerate(lengths):
                slots = self.slots(index)[:length]
                cache[slots] = torch.randn(length, num_kv_heads, width, generator=generator)
            caches.append(cache.to(device, dtype))
        self.key_cache, self.value_cache = caches

    @staticmethod
    def _shuffled_pages(lengths: list[int], page_size: int, seed: int) -> Tensor:
        """Pages of each request, all shuffled; spare entries name a last page of NaN."""
        counts = [-(-length // page_size) for length in lengths]
        pages = list(range(sum(counts)))
        random.Random(seed).shuffle(pages)
        table = torch.full((len(lengths), max([*counts, 0]) + 1), len(pages))
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor(pages[:count])
            pages = pages[count:]
        return table

    def slots(self, index: int) -> Tensor:
        """Slots of a request's places in order, and of those its spare pages have."""
        page_size = self.geometry.page_size
        return (self._page_table[index, :, None] * page_size + torch.arange(page_size)).flatten()

    def rows(self, encoding: MaskEncoding, **changes: Any) -> PagedRows:
        """The step's rows with masks in this encoding; `changes` replace fields."""
        counts = torch.tensor([0] + [len(request.rows) for request in self.requests])
        prefixes = [request.prefix for request in self.requests]
        blocks = [len(request.parents) for request in self.requests]
        max_block, max_prefix = max([*blocks, 0]), max([*prefixes, 0])
        query_positions, key_positions = [], torch.zeros(len(self.requests), max_block, dtype=torch.int64)
        for index, request in enumerate(self.requests):
            positions = [request.prefix + len(request.path(place)) - 1 for place in range(len(request.parents))]
            key_positions[index, : len(positions)] = torch.tensor(positions)
            query_positions += [positions[place] for place in request.rows]
        device, has_positions = self.geometry.device, not self.is_causal
        mask = None if self.is_causal else self._mask(encoding, int(counts.max()), max_block).to(device)
        fields = {
            "row_starts": counts.cumsum(0).int().to(device),
            "prefix_lengths": torch.tensor(prefixes, dtype=torch.int32, device=device),
            "block_lengths": torch.tensor(blocks, dtype=torch.int32, device=device),
            "page_table": self._page_table.int().to(device),
            "mask": mask,
            "max_rows": int(counts.max()),
            "max_block": max_block,
            "max_prefix": max_prefix,
            "query_positions": torch.tensor(query_positions, dtype=torch.int64, device=device)
            if has_positions
            else None,
            "key_positions": key_positions.to(device) if has_positions else None,
        }
        return PagedRows(**(fields | changes))

    def _mask(self, encoding: MaskEncoding, max_rows: int, max_block: int) -> Tensor:
        """Padding rows see nothing in PACKED, and the first key in FULL."""
        tree = torch.zeros(len(self.requests), max_rows, max_block, dtype=torch.bool)
        num_keys = max([request.prefix + len(request.parents) for request in self.requests] or [0])
        full = torch.zeros(len(self.requests), max_rows, num_keys, dtype=torch.bool)
        full[:, :, :1] = True
        for index, request in enumerate(self.requests):
            for row, place in enumerate(request.rows):
                tree[index, row, request.path(place)] = True
                full[index, row, : request.prefix] = True
                full[index, row, request.prefix : request.prefix + max_block] = tree[
                    index, row, : num_keys - request.prefix
                ]
        return full if encoding is MaskEncoding.FULL else packed(tree)

    def expected(self, options: AttentionOptions = PLAIN_ATTENTION) -> Tensor:
        """Softmax over what each row sees, in float64, head by head, `[T, Hq, Dv]`."""
        geometry = self.geometry
        out = torch.empty(self.num_rows, geometry.num_heads, geometry.value_head_dim, dtype=torch.float64)
        row = 0
        for index, request in enumerate(self.requests):
            slots = self.slots(index)
            for place in request.rows:
                path = request.path(place)
                positions = [*range(request.prefix), *range(request.prefix, request.prefix + len(path))]
                places = [*range(request.prefix), *(request.prefix + ancestor for ancestor in path)]
                if options.window is not None:
                    far = sum(position <= positions[-1] - options.window for position in positions)
                    places = places[far:]
                out[row] = self._attend_by_hand(self.query[row], slots[places], options)
                row += 1
        return out

    def _attend_by_hand(self, query: Tensor, seen: Tensor, options: AttentionOptions) -> Tensor:
        group = self.geometry.group
        keys = self.key_cache[seen].cpu().double().repeat_interleave(group, dim=1)  # [L, Hq, D]
        values = self.value_cache[seen].cpu().double().repeat_interleave(group, dim=1)
        scale = self.geometry.head_dim**-0.5 if options.scale is None else options.scale
        logits = torch.einsum("hd,lhd->hl", query.cpu().double(), keys) * scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        if options.sinks is not None:
            logits = torch.cat([logits, options.sinks.cpu().double()[:, None]], dim=1)
        weights = logits.softmax(dim=1)[:, : seen.numel()]
        return torch.einsum("hl,lhd->hd", weights, values)


def packed(tree: Tensor) -> Tensor:
    """PACKED form of a mask bool `[B, N, K]`: one narrow word up to 64 places, else words of 64."""
    num_places = tree.shape[-1]
    words = []
    for first in range(0, max(num_places, 1), 64):
        bits = tree[..., first : first + 64]
        words.append((bits.to(torch.int64) << torch.arange(bits.shape[-1])).sum(dim=-1))
    stacked = torch.stack(words, dim=-1)
    if num_places > 64:
        return stacked.view(torch.uint64)
    narrow = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}
    return stacked.to(narrow[next(width for width in narrow if num_places <= width)])
