"""Measuring at start which target states a head was trained on.

Files name the states by conventions that differ by one layer between systems, or not at all, and the wrong ones raise
no error: the head is only hardly ever accepted. So the target writes a few short answers, and the head is asked, under
every plausible reading, how often its first candidate is the target's own next token.

Letters: T rows of a text, A states of a reading, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from eyas.models.attention import Attention, no_attention
from eyas.models.head import DraftHead
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.messages import DecodeItem, NewRequest, PrefillChunk, StepPlan
from eyas.workers.paged_attention import text_attention
from eyas.workers.sampler import NoiseRanker, RowSampling
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

PROBE_TOKENS = 32  # per prompt; eight prompts give a few hundred, which tells a tenth from a half
_LOW_AGREEMENT = 0.05
_CLEAR_GAIN = 0.05


class ProbeReport(msgspec.Struct, frozen=True):
    """Share of positions at which the head's first candidate is the target's next token, for every reading.

    Args:
        captures: target states of each reading, that of the head's files first.
        agreement: of each.
        num_tokens: positions compared.
    """

    captures: list[tuple[int, ...]]
    agreement: list[float]
    num_tokens: int

    @property
    def best(self) -> int:
        """Index of the reading to use: the files' own unless another is clearly better."""
        best = max(range(len(self.agreement)), key=self.agreement.__getitem__)
        return best if self.agreement[best] - self.agreement[0] > _CLEAR_GAIN else 0

    @property
    def capture(self) -> tuple[int, ...]:
        return self.captures[self.best]

    def warnings(self) -> list[str]:
        """What whoever runs the server should know; empty when all is well."""
        found = []
        if self.best:
            found.append(
                f"the head's files name the target states {list(self.captures[0])}, with which its first candidate is "
                f"right in {self.agreement[0]:.0%} of {self.num_tokens} positions; {list(self.capture)} gives "
                f"{self.agreement[self.best]:.0%} and is used; --aux-layers settles it, --skip-probe trusts the files"
            )
        if self.agreement[self.best] < _LOW_AGREEMENT:
            found.append(
                f"the head's first candidate is right in only {self.agreement[self.best]:.1%} of {self.num_tokens} "
                "positions: it was probably made for another target; answers stay exact but will be slow"
            )
        return found


@dataclass(frozen=True, slots=True)
class ProbeText:
    """A text the target wrote after `num_prompt` tokens, and the states captured; the last token has none."""

    token_ids: list[int]
    features: Tensor
    num_prompt: int


def write_probe_texts(runner: TargetRunner, prompts: list[list[int]], num_tokens: int) -> list[ProbeText]:
    """Greedy answers to the first `prompts` that fit, on the runner's pages; every rank must call it alike."""
    page_size = runner.layout.page_size
    prompts = _fitting(prompts, num_tokens, runner)
    texts = [list(prompt) for prompt in prompts]
    features: list[list[Tensor]] = [[] for _ in prompts]
    pages: dict[int, list[int]] = {}
    first_page = 0
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + num_tokens) // page_size)
        pages[index] = list(range(first_page, first_page + count))
        first_page += count
    new = [NewRequest(index, prompt, SamplingParams()) for index, prompt in enumerate(prompts)]
    plan = StepPlan(
        step=0, new=new, new_pages=pages, prefill=[PrefillChunk(index, len(text)) for index, text in enumerate(texts)]
    )
    for step in range(num_tokens):
        verified = runner.step(plan, {})
        if verified.features is not None:
            parts = verified.features.split([run.num_committed for run in verified.runs])
            for run, part in zip(verified.runs, parts, strict=True):
                features[run.request_id].append(part.clone())
        for run in verified.runs:
            texts[run.request_id] += run.tokens
        plan = StepPlan(step=step + 1, decode=[DecodeItem(index, 1) for index in range(len(prompts))])
    runner.step(StepPlan(step=num_tokens, finished=list(range(len(prompts)))), {})
    return [
        ProbeText(text, torch.cat(rows), len(prompt))
        for text, rows, prompt in zip(texts, features, prompts, strict=True)
    ]


def _fitting(prompts: list[list[int]], num_tokens: int, runner: TargetRunner) -> list[list[int]]:
    kept, num_pages = [], 0
    for prompt in prompts:
        needed = -(-(len(prompt) + num_tokens) // runner.layout.page_size)
        if num_pages + needed > runner.layout.num_pages or len(prompt) + num_tokens > runner.model.config.max_positions:
            break
        kept.append(prompt)
        num_pages += needed
    return kept


@torch.inference_mode()
def measure_agreement(head: DraftHead, text: ProbeText, columns: Tensor) -> tuple[int, int]:
    """Positions of the answer at which the head's first candidate is the next token, and their number.

    Args:
        columns: which columns of the text's features the head reads, int64.
    """
    features = text.features[:, columns]
    num_rows = features.shape[0] - 1  # the pair of the last row would foretell a token that is not there
    token_ids = torch.tensor(text.token_ids[1 : num_rows + 1], device=head.device)
    positions = torch.arange(num_rows, device=head.device)
    states = head.extend(features[:num_rows].to(head.device), token_ids, positions, _own_attention(head, num_rows))
    first = max(text.num_prompt - 2, 0)  # the pair of row i foretells token i + 2
    states, expected = states[first:], text.token_ids[first + 2 : num_rows + 2]
    rows = RowSampling([SamplingParams()] * len(expected), [0] * len(expected))
    found = head.candidates(states, range(1, 2), NoiseRanker(rows, 1)).tokens[:, 0].tolist()
    return sum(a == b for a, b in zip(found, expected, strict=True)), len(expected)


def _own_attention(head: DraftHead, num_rows: int) -> Attention:
    cache = head.cache
    if cache is None:
        return no_attention
    pool = KVPool(
        PoolLayout(num_rows, 1), cache.num_layers, cache.num_kv_heads, cache.head_dim, head.dtype, head.device,
        value_head_dim=cache.value_head_dim,
    )  # fmt: skip
    return text_attention(pool, cache.num_heads, torch.arange(num_rows, device=head.device))


def probe_head(
    runner: TargetRunner, head: DraftHead | None, captures: list[tuple[int, ...]], prompts: list[list[int]],
    num_tokens: int = PROBE_TOKENS,
) -> ProbeReport | None:  # fmt: skip
    """Measure every reading of `captures` on one set of texts; restores the runner's own capture.

    Args:
        head: None on the ranks that only help to write the texts.

    Returns:
        None on those ranks, and if the pool or the context is too small for a single text.
    """
    own, runner.capture = runner.capture, tuple(sorted({index for capture in captures for index in capture}))
    try:
        texts = write_probe_texts(runner, prompts, num_tokens)
        if head is None or not texts:
            return None
        width = texts[0].features.shape[1] // len(runner.capture)
        place = {index: torch.arange(width) + rank * width for rank, index in enumerate(runner.capture)}
        agreement, num_compared = [], 0
        for capture in captures:
            columns = torch.cat([place[index] for index in capture])
            counts = [measure_agreement(head, text, columns) for text in texts]
            num_compared = sum(total for _, total in counts)
            agreement.append(sum(right for right, _ in counts) / max(num_compared, 1))
        return ProbeReport(captures, agreement, num_compared)
    finally:
        runner.capture = own
