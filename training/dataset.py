"""The corpus: an index of its conversations, and the order in which they become training batches.

Letters: T rows, A fused layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from eyas.training.batch import Batch
from eyas.training.packing import in_groups
from eyas.training.shard import Shard

_BATCHES_PER_POOL = 32

ComputeStates = Callable[[Tensor, list[int]], Tensor]
"""`token_ids [T]` of conversations end to end and their lengths, to the target's states `[T, (A + 1) * H]`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Where one conversation lies in the corpus; `prompt_length` of its `length` rows precede the first answer."""

    shard: int
    start: int
    length: int
    prompt_length: int


class Corpus:
    """Shards and an index of their conversations.

    Args:
        max_length: longer conversations are cut to this many rows; what then holds no answer row is left out.
        stop_token_id: cut from the end of an answer, because nothing follows it.
        compute_states: gives the target's states where a shard holds none; None refuses such shards.
    """

    def __init__(
        self,
        shards: list[Shard],
        max_length: int,
        stop_token_id: int | None = None,
        compute_states: ComputeStates | None = None,
    ) -> None:
        if compute_states is None and any(shard.features is None for shard in shards):
            raise ValueError("the corpus holds texts without the target's states; compute them with --states online")
        self.shards = shards
        self._compute_states = compute_states
        self.conversations: list[Conversation] = []
        for index, shard in enumerate(shards):
            start = 0
            for length, prompt_length in zip(shard.lengths, shard.prompt_lengths(), strict=True):
                ends_in_stop = length > prompt_length and int(shard.token_ids[start + length - 1]) == stop_token_id
                kept = min(length - ends_in_stop, max_length)
                if kept > max(prompt_length, 1):
                    self.conversations.append(Conversation(index, start, kept, prompt_length))
                start += length
        if not self.conversations:
            raise ValueError("the corpus holds no conversation with an answer")

    def split(self, validation_share: float) -> tuple[list[Conversation], list[Conversation]]:
        """Training and validation conversations; the latter are the last ones, at least one of each kind.

        Training gets none that begins with the same prompt as one of validation, or a head would be measured on other
        answers to prompts it has learnt; one prompt at least is left to it.
        """
        total = len(self.conversations)
        # A window of plain text has no prompt; its index stands for one that no other has.
        prompts = [self._prompt(item) or index for index, item in enumerate(self.conversations)]
        num_prompts = len(set(prompts))
        if num_prompts < 2:
            raise ValueError("the corpus must hold two conversations with different prompts, one for validation")
        num_validation = min(max(1, round(validation_share * total)), total - 1)
        held_out: set[tuple[int, ...] | int] = set()
        validation: list[Conversation] = []
        for item, prompt in zip(reversed(self.conversations), reversed(prompts), strict=True):
            if len(validation) < num_validation and len(held_out | {prompt}) < num_prompts:
                held_out.add(prompt)
                validation.append(item)
        training = [item for item, prompt in zip(self.conversations, prompts, strict=True) if prompt not in held_out]
        return training, validation[::-1]

    def _prompt(self, conversation: Conversation) -> tuple[int, ...]:
        """Tokens before the first answer; none for a window of plain text, whose first token is no prompt."""
        if conversation.prompt_length < 2:
            return ()
        start = conversation.start
        shard = self.shards[conversation.shard]
        return tuple(shard.token_ids[start : start + conversation.prompt_length].tolist())

    def answer(self, conversation: Conversation) -> Tensor:
        """Answer tokens, int64."""
        shard = self.shards[conversation.shard]
        return self._rows(shard.token_ids, conversation)[self._rows(shard.is_answer, conversation)]

    def batch(self, conversations: list[Conversation]) -> Batch:
        """Read the rows of `conversations`, and compute what states are not there."""
        return Batch(
            token_ids=self._token_ids(conversations),
            is_answer=torch.cat([self._rows(self.shards[item.shard].is_answer, item) for item in conversations]),
            features=self._features(conversations),
            lengths=[item.length for item in conversations],
            prompt_lengths=[item.prompt_length for item in conversations],
        )

    def _token_ids(self, conversations: list[Conversation]) -> Tensor:
        return torch.cat([self._rows(self.shards[item.shard].token_ids, item) for item in conversations])

    def _features(self, conversations: list[Conversation]) -> Tensor:
        missing = [item for item in conversations if self.shards[item.shard].features is None]
        if not missing or self._compute_states is None:
            return torch.cat([self._recorded(item) for item in conversations])
        lengths = [item.length for item in missing]
        computed = self._compute_states(self._token_ids(missing), lengths)
        if len(missing) == len(conversations):
            return computed
        pieces = iter(computed.cpu().split(lengths))
        return torch.cat([next(pieces) if item in missing else self._recorded(item) for item in conversations])

    def _recorded(self, conversation: Conversation) -> Tensor:
        features = self.shards[conversation.shard].features
        assert features is not None  # the constructor has looked
        return self._rows(features, conversation)

    @staticmethod
    def _rows(tensor: Tensor, conversation: Conversation) -> Tensor:
        return tensor[conversation.start : conversation.start + conversation.length]


def make_batches(conversations: list[Conversation], tokens_per_batch: int) -> list[list[Conversation]]:
    """Cut conversations, in the given order, into groups of at most `tokens_per_batch` rows (one may be longer)."""
    return in_groups(conversations, lambda item: item.length, tokens_per_batch)


def epoch_batches(
    conversations: list[Conversation], tokens_per_batch: int, seed: int, epoch: int
) -> list[list[Conversation]]:
    """One epoch in an order that depends on `(seed, epoch)` alone.

    Shuffled conversations are sorted by length within pools of some batches, so that a batch is of like length but its
    company changes from epoch to epoch; then the batches are filled up and shuffled.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = [conversations[index] for index in torch.randperm(len(conversations), generator=generator).tolist()]
    batches = [
        batch
        for pool in make_batches(shuffled, tokens_per_batch * _BATCHES_PER_POOL)
        for batch in _filled(sorted(pool, key=lambda item: item.length), tokens_per_batch)
    ]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _filled(conversations: list[Conversation], tokens_per_batch: int) -> list[list[Conversation]]:
    """Batches, each filled up with the beginnings of texts of the following ones, the first coming after the last, so
    that all are of one size; see `rounding` for why."""
    batches = make_batches(conversations, tokens_per_batch)
    filled = []
    for index, batch in enumerate(batches):
        room = tokens_per_batch - sum(item.length for item in batch)
        others = chain.from_iterable([*batches[index + 1 :], *batches[:index]])
        added = []
        while room > 0 and (item := next(others, None)) is not None:
            added.append(replace(item, length=min(item.length, room)))
            room -= added[-1].length
        filled.append([*batch, *added])
    return filled


def training_order(
    conversations: list[Conversation], tokens_per_batch: int, seed: int, first_step: int = 0
) -> Iterator[list[Conversation]]:
    """Endless epochs of batches, from step `first_step` on."""
    epoch, skipped = 0, 0
    while True:
        batches = epoch_batches(conversations, tokens_per_batch, seed, epoch)
        yield from batches[max(0, first_step - skipped) :]
        skipped += len(batches)
        epoch += 1
