"""Choosing the draft vocabulary: the target's ids the head is able to propose.

Letters: K kept ids, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Args:
    token_ids: target ids, strictly increasing, int64 `[K]`.
    coverage: share of the counted tokens that are among them.
    """

    token_ids: Tensor
    coverage: float


def count_tokens(texts: Iterable[Tensor], vocab_size: int) -> Tensor:
    """How often each target id occurs in `texts` (int64 `[T]` each), int64 `[V]`."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text, minlength=vocab_size)
    return counts


def choose_vocabulary(counts: Tensor, size: int, required_ids: Iterable[int] = ()) -> DraftVocabulary:
    """The `required_ids` and the most frequent others, `size` in all; of equally frequent ids the lower one is kept.

    Raises:
        ValueError: if `size` exceeds the vocabulary, cannot hold the required ids, or an id does not exist.
    """
    required = sorted(set(required_ids))
    vocab_size = counts.shape[0]
    if not max(1, len(required)) <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size: must be between {max(1, len(required))} and {vocab_size}, got {size}")
    if required and not 0 <= required[0] <= required[-1] < vocab_size:
        raise ValueError(f"required ids {required} are not all within the vocabulary of {vocab_size}")
    order = counts.argsort(descending=True, stable=True)
    is_other = torch.ones(vocab_size, dtype=torch.bool)
    is_other[required] = False
    others = order[is_other[order]][: size - len(required)]
    token_ids = torch.cat([torch.tensor(required, dtype=torch.int64), others]).sort().values
    return DraftVocabulary(token_ids, float(counts[token_ids].sum()) / max(1, int(counts.sum())))
