"""One file of a corpus: conversations end to end, which tokens are answers, the target's states at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.models.whole_files import save_whole


@dataclass(frozen=True, slots=True)
class Shard:
    """Conversations end to end.

    Args:
        token_ids: int64 `[T]`.
        is_answer: tokens of the target's turns, which a head is trained to foretell, bool `[T]`.
        lengths: of every conversation.
        features: bfloat16 `[T, A * H]`; None where they are to be computed when they are needed.
    """

    token_ids: Tensor
    is_answer: Tensor
    lengths: list[int]
    features: Tensor | None

    def prompt_lengths(self) -> list[int]:
        """Per conversation, the tokens before its first answer token; all of them where there is no answer."""
        return [
            int(mask.int().argmax()) if bool(mask.any()) else mask.shape[0]
            for mask in self.is_answer.split(self.lengths)
        ]


def shard_files(folder: Path) -> list[Path]:
    """Complete shards of a corpus, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_shard(file: Path) -> Shard:
    """Read a shard that `save_shard` wrote.

    Its tensors are mapped from the file, so that of its states only the rows that are used are read, into pages the
    system may drop again: a corpus may be larger than the memory.
    """
    tensors = load_file(file)
    lengths: list[int] = tensors["lengths"].tolist()
    is_answer = tensors.get("is_answer")
    if is_answer is None:  # one answer a conversation, to its end
        starts = tensors["prompt_lengths"].repeat_interleave(tensors["lengths"])
        is_answer = torch.cat([torch.arange(length) for length in lengths]) >= starts
    return Shard(tensors["token_ids"], is_answer, lengths, tensors.get("features"))


def save_shard(shard: Shard, file: Path) -> None:
    """Write a shard; the file appears complete or not at all."""
    tensors = {"token_ids": shard.token_ids, "is_answer": shard.is_answer, "lengths": torch.tensor(shard.lengths)}
    if shard.features is not None:
        tensors["features"] = shard.features.contiguous()
    save_whole(tensors, file)


def count_answer_tokens(files: list[Path]) -> int:
    """Answer tokens in the given shards; their states are not read."""
    from safetensors import safe_open

    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            has_mask = "is_answer" in set(opened.keys())
            if has_mask:
                total += int(opened.get_tensor("is_answer").sum())
            else:
                total += int((opened.get_tensor("lengths") - opened.get_tensor("prompt_lengths")).sum())
    return total


def count_rows(files: list[Path]) -> int:
    """Tokens in the given shards, prompts included; their states are not read."""
    from safetensors import safe_open

    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            total += int(opened.get_tensor("lengths").sum())
    return total


def holds_states(file: Path) -> bool:
    """Whether a shard holds the target's states."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return "features" in set(opened.keys())
