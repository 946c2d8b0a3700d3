from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.training.dataset import Conversation, Corpus, epoch_batches, make_batches, training_order
from eyas.training.shard import Shard

STOP = 2


def answers_after(prompt_lengths: list[int], lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) >= prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)])


def make_shard(texts: list[list[int]], prompt_lengths: list[int]) -> Shard:
    token_ids = torch.tensor([token for text in texts for token in text])
    features = torch.arange(token_ids.shape[0], dtype=torch.bfloat16)[:, None]
    lengths = [len(text) for text in texts]
    return Shard(token_ids, answers_after(prompt_lengths, lengths), lengths, features)


def conversations_of(lengths: list[int]) -> list[Conversation]:
    return [Conversation(0, sum(lengths[:index]), length, 2) for index, length in enumerate(lengths)]


def test_a_batch_reads_the_rows_of_its_conversations() -> None:
    """Catches offsets that slip between conversations or shards, and successors taken from the next conversation."""
    corpus = Corpus([make_shard([[5, 6, 7], [8, 9]], [1, 1]), make_shard([[3, 4, 5, 6]], [2])], 16, STOP)
    batch = corpus.batch([corpus.conversations[2], corpus.conversations[1]])
    assert batch.token_ids.tolist() == [3, 4, 5, 6, 8, 9]
    assert batch.features.flatten().tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.next_ids.tolist() == [4, 5, 6, -1, 9, -1]


def test_bases_predict_answer_tokens_and_nothing_else() -> None:
    """Catches a loss on prompt tokens, a first answer token never predicted, and later steps past the end of a text."""
    corpus = Corpus([make_shard([[5, 6, 7, 8, 9, 10], [11, 12, 13]], [3, 2])], 16, STOP)
    batch = corpus.batch(corpus.conversations)
    assert batch.rows(0).tolist() == [1, 2, 3, 4, 6, 7]
    assert batch.rows(1).tolist() == [1, 2, 3, 6]
    assert batch.rows(2).tolist() == [1, 2]
    assert batch.rows(4).tolist() == []


@pytest.mark.parametrize(
    ("text", "prompt_length", "kept"),
    [
        ([5, 6, 7, 8, STOP], 2, 4),
        ([STOP, 5, STOP, 7, 8], 2, 5),
        ([5, 6, STOP], 3, None),
        ([5, 6, STOP], 2, None),
        (list(range(5, 20)), 2, 8),
        (list(range(5, 20)), 8, None),
    ],
)
def test_what_is_kept_of_a_conversation(text: list[int], prompt_length: int, kept: int | None) -> None:
    """Catches training on what follows the end of a text, texts past `max_length`, and conversations without answer."""
    corpus = Corpus([make_shard([[9, 9, 9], text], [1, prompt_length])], 8, STOP)
    assert [item.length for item in corpus.conversations[1:]] == ([] if kept is None else [kept])


def test_validation_is_the_end_of_the_corpus() -> None:
    """Catches a split that is random, that shares conversations, or that leaves one side empty."""
    corpus = Corpus([make_shard([[5, 6, 7]] * 10, [1] * 10)], 16, STOP)
    training, validation = corpus.split(0.2)
    assert training + validation == corpus.conversations
    assert len(validation) == 2
    assert len(corpus.split(0.001)[1]) == 1
    assert len(corpus.split(0.999)[0]) == 1
    with pytest.raises(ValueError, match="two conversations with different prompts"):
        Corpus([make_shard([[5, 6, 7]], [1])], 16, STOP).split(0.5)


def test_batches_respect_the_row_budget() -> None:
    """Catches batches above the budget, lost conversations, and an endless loop on one longer than the budget."""
    batches = make_batches(conversations_of([4, 5, 3, 20, 2, 8]), tokens_per_batch=10)
    assert [[item.length for item in batch] for batch in batches] == [[4, 5], [3], [20], [2, 8]]


def test_an_epoch_holds_every_conversation_once() -> None:
    """Catches conversations lost or doubled by pooling, and epochs or seeds that repeat an order."""
    conversations = conversations_of([3 + index % 17 for index in range(200)])
    first, again, second, other = (
        epoch_batches(conversations, 40, seed, epoch) for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]
    )
    by_start = {item.start: item for item in conversations}
    whole = [[item for item in batch if item == by_start[item.start]] for batch in first]
    # What a batch is filled up with may be whole, too, but is one of the texts of another.
    assert {item.start for batch in whole for item in batch} == set(by_start)
    assert first == again
    assert first != second
    assert first != other
    spreads = [max(item.length for item in batch) - min(item.length for item in batch) for batch in whole]
    assert sum(spreads) / len(spreads) < 3


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=20), epoch=st.integers(0, 3))
def test_batches_are_filled_up_with_beginnings_of_others(lengths: list[int], epoch: int) -> None:
    """Catches batches of many sizes, for each of which kernels are made anew, a text that comes twice in a batch, and
    texts that are trained on cut off alone."""
    conversations = conversations_of(lengths)
    batches = epoch_batches(conversations, 40, 0, epoch)
    for batch in batches:
        size = sum(item.length for item in batch)
        holds_all = {item.start for item in batch} == {item.start for item in conversations}
        assert size == 40 or (size > 40 and len(batch) == 1) or (size < 40 and holds_all)
        assert len({item.start for item in batch}) == len(batch)
        assert all(item in conversations for item in batch[:-1])
    assert {item for batch in batches for item in batch} >= set(conversations)


def test_order_goes_on_where_a_run_stopped() -> None:
    """Catches a resumed run that repeats or skips batches, within an epoch and across its end."""
    conversations = conversations_of([5 + index % 7 for index in range(30)])
    whole = list(islice(training_order(conversations, 40, seed=3), 25))
    for first_step in (0, 2, 11, 24):
        assert list(islice(training_order(conversations, 40, 3, first_step), 25 - first_step)) == whole[first_step:]


def test_turns_of_the_user_within_a_conversation_are_no_answers() -> None:
    """Catches a head trained on what the user says between two answers."""
    is_answer = torch.tensor([False, False, True, True, False, True, False, True])
    shard = Shard(torch.arange(10, 18), is_answer, [6, 2], torch.zeros(8, 1))
    corpus = Corpus([shard], max_length=64)
    assert [item.prompt_length for item in corpus.conversations] == [2, 1]
    assert corpus.answer(corpus.conversations[0]).tolist() == [12, 13, 15]
    batch = corpus.batch(corpus.conversations)
    assert batch.precedes_answer.tolist() == [False, True, True, False, True, True, True, True]


def test_validation_prompts_are_not_trained_on() -> None:
    """Catches a head measured on other answers to prompts it has learnt, when prompts are answered more than once."""
    texts = [[5, 6, 10], [5, 7, 11], [5, 6, 12], [5, 8, 13], [5, 7, 14]]
    corpus = Corpus([make_shard(texts, [2] * 5)], 16, STOP)
    training, validation = corpus.split(0.2)
    assert [corpus.answer(item).item() for item in validation] == [14]
    assert [corpus.answer(item).item() for item in training] == [10, 12, 13]
    with pytest.raises(ValueError, match="two conversations with different prompts"):
        Corpus([make_shard([[5, 6, 10]] * 3, [2] * 3)], 16, STOP).split(0.2)


def test_two_prompts_are_enough() -> None:
    """Catches nothing left to train on where a few prompts are answered so often that validation meets them all."""
    texts = [[5, 6 + index % 2, 10 + index] for index in range(20)]
    corpus = Corpus([make_shard(texts, [2] * 20)], 64, STOP)
    training, validation = corpus.split(0.4)
    assert [corpus.answer(item).item() for item in validation] == list(range(15, 30, 2))
    assert [corpus.answer(item).item() for item in training] == list(range(10, 30, 2))


def test_states_that_are_not_there_are_computed() -> None:
    """Catches states of another conversation where recorded and computed ones meet, and rows past a cut."""
    asked: list[tuple[list[int], list[int]]] = []

    def compute(token_ids: Tensor, lengths: list[int]) -> Tensor:
        asked.append((token_ids.tolist(), lengths))
        return token_ids[:, None].to(torch.bfloat16) * 2

    recorded = make_shard([[5, 6, 7], [8, 9]], [1, 1])
    bare = make_shard([[3, 4, 5, 6, 7], [10, 11, STOP]], [2, 1])
    bare = Shard(bare.token_ids, bare.is_answer, bare.lengths, None)
    corpus = Corpus([recorded, bare], 4, STOP, compute)
    first, second, third, fourth = corpus.conversations
    batch = corpus.batch([third, second, fourth])
    assert asked == [([3, 4, 5, 6, 10, 11], [4, 2])]
    assert batch.features.flatten().tolist() == [6, 8, 10, 12, 3, 4, 20, 22]
    assert corpus.batch([third]).features.flatten().tolist() == [6, 8, 10, 12]
    assert corpus.batch([first]).features.flatten().tolist() == [0, 1, 2]
    assert len(asked) == 2
    with pytest.raises(ValueError, match="holds texts without the target's states; compute them with --states online"):
        Corpus([recorded, bare], 4, STOP)
