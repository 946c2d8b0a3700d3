"""Texts as token ids, and the checks that what a user gave is enough to train on.

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_CHARACTERS = 1_000_000
_FEW_BATCHES = 5


@dataclass(frozen=True, slots=True)
class Text:
    """One conversation or window.

    Args:
        token_ids: int64 `[T]`.
        is_answer: what a head is trained to foretell, bool `[T]`.
    """

    token_ids: Tensor
    is_answer: Tensor


def cut_texts(texts: Sequence[Text], max_length: int, origin: str, limit: str) -> tuple[list[Text], str | None]:
    """Texts of at most `max_length` tokens that hold an answer, and a line about those that were longer.

    Args:
        origin: option and file.
        limit: what the length may be raised to, for the remedy.

    Raises:
        ValueError: if all are longer, or fewer than two are left.
    """
    num_long = sum(text.token_ids.shape[0] > max_length for text in texts)
    if texts and num_long == len(texts):
        shortest = min(text.token_ids.shape[0] for text in texts)
        raise ValueError(
            f"{origin}: all {num_long} conversations are longer than {max_length} tokens, the shortest has {shortest}; "
            f"raise --max-length ({limit}) or give shorter conversations"
        )
    cut = [Text(text.token_ids[:max_length], text.is_answer[:max_length]) for text in texts]
    kept = [text for text in cut if bool(text.is_answer.any())]
    if len(kept) < 2:
        raise ValueError(
            f"{origin}: holds {len(kept)} conversation{'' if len(kept) == 1 else 's'} to train on, at least 2 are "
            "needed, one of them for validation; add texts"
        )
    prompts = {tuple(text.token_ids[: int(text.is_answer.int().argmax())].tolist()) for text in kept}
    if len(prompts) < 2:
        raise ValueError(
            f"{origin}: all {len(kept)} conversations begin with the same prompt, at least 2 are needed, one of them "
            "for validation; add others"
        )
    if not num_long:
        return kept, None
    note = f"{origin}: {num_long} of {len(texts)} conversations are longer than {max_length} tokens (--max-length) "
    lost = len(cut) - len(kept)
    return kept, note + "and were cut" + (f"; {lost} had no answer left and were left out" if lost else "")


def windows(token_ids: Sequence[int], size: int, first_id: int | None = None) -> list[Text]:
    """Cut a text into windows of `size` tokens; all but the first token of each are answers.

    What is left at the end is a shorter window, unless it is a single token, after which nothing can be foretold.

    Args:
        first_id: begins every window and counts in its size; None begins it with the text itself.
    """
    prefix = [] if first_id is None else [first_id]
    step = size - len(prefix)
    pieces = (prefix + list(token_ids[start : start + step]) for start in range(0, len(token_ids), step))
    return [Text(torch.tensor(piece), torch.arange(len(piece)) > 0) for piece in pieces if len(piece) > 1]


def encode_in_pieces(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of a long text, piece by piece: tokenizers need many times a text's size in memory.

    Pieces end with a line, unless a line is longer.
    """
    token_ids: list[int] = []
    start = 0
    while start < len(text):
        end = min(len(text), start + _CHUNK_CHARACTERS)
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        token_ids += encode(text[start:end])
        start = end
    return token_ids


def warning_if_few(num_tokens: int, tokens_per_batch: int, option: str) -> str | None:
    """A line to print if texts are so few that a head learns them by heart."""
    if num_tokens >= _FEW_BATCHES * tokens_per_batch:
        return None
    return (
        f"warning: {option}: {num_tokens:,} tokens are fewer than {_FEW_BATCHES} batches of {tokens_per_batch:,} "
        "(--batch-tokens); the head will learn them by heart: give more texts"
    )
