from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.training.corpus import InventedTurns, UserTurnTemplate, write_corpus
from eyas.training.generation import CorpusConfig, GeneratedText, GenerationJob
from eyas.training.given_prompts import GivenPrompts
from eyas.training.shard import count_answer_tokens, read_shard, shard_files

BEFORE, AFTER, STOP = [1, 2], [3], 0
ROW_SIZE = 4


class ScriptedTarget:
    """Turns that differ by seed, answers of three tokens; keeps the answers it was asked for."""

    def __init__(self) -> None:
        self.answer_jobs: list[GenerationJob] = []
        self._num_requests = 0
        self._lengths: dict[int, int] = {}

    def generate(self, jobs: list[GenerationJob]) -> list[GeneratedText]:
        texts = []
        for job in jobs:
            is_turn = job.prompt_ids == BEFORE
            tokens = [10 + job.seed % 97, 10 + job.seed % 89, STOP] if is_turn else [7, 8, STOP]
            if not is_turn:
                self.answer_jobs.append(job)
            self._lengths[self._num_requests] = len(job.prompt_ids) + len(tokens) - 1
            texts.append(GeneratedText(self._num_requests, tokens))
            self._num_requests += 1
        return texts

    def clear(self) -> None:
        self._lengths.clear()

    def take(self, request_id: int) -> torch.Tensor:
        return torch.zeros(self._lengths.pop(request_id), ROW_SIZE, dtype=torch.bfloat16)


def written(folder: Path) -> ScriptedTarget:
    target = ScriptedTarget()
    config = CorpusConfig(num_tokens=100, conversations_per_shard=60, greedy_share=0.5)
    template = UserTurnTemplate(BEFORE, AFTER)
    turns = InventedTurns(template, config, target.generate, target, frozenset({STOP}))  # type: ignore[arg-type]
    write_corpus(folder, config.num_tokens, turns, target.generate, target)  # type: ignore[arg-type]
    return target


def test_greedy_answers_are_spread_over_the_turns(tmp_path: Path) -> None:
    """Catches a share of greedy answers that all go to the turns which come first in the alphabet."""
    target = written(tmp_path / "a")
    greedy = [job.prompt_ids for job in target.answer_jobs if job.temperature == 0]
    sampled = [job.prompt_ids for job in target.answer_jobs if job.temperature > 0]
    assert abs(len(greedy) - len(sampled)) <= len(target.answer_jobs) // 60 + 1
    middle = sorted(greedy + sampled)[len(greedy)]
    assert 0.2 < sum(prompt < middle for prompt in greedy) / len(greedy) < 0.8
    again = written(tmp_path / "b")
    assert again.answer_jobs == target.answer_jobs


def test_shards_hold_what_was_written(tmp_path: Path) -> None:
    """Catches features that are shifted against their tokens, and a last token without features that is kept."""
    target = written(tmp_path)
    files = shard_files(tmp_path)
    assert count_answer_tokens(files) >= 100
    shard = read_shard(files[0])
    assert shard.features is not None
    assert shard.features.shape == (sum(shard.lengths), ROW_SIZE)
    first = target.answer_jobs[0]
    assert shard.token_ids[: shard.lengths[0]].tolist() == [*first.prompt_ids, 7, 8]
    assert shard.prompt_lengths()[0] == len(first.prompt_ids)


def test_texts_can_be_written_without_states(tmp_path: Path) -> None:
    """Catches a corpus for states computed later that waits for a recorder, or loses the end of an answer."""
    target = ScriptedTarget()
    config = CorpusConfig(conversations_per_shard=2, greedy_share=1.0)
    write_corpus(tmp_path, 10**6, GivenPrompts([[1, 5], [1, 6, 3]], config), target.generate, None)
    (file,) = shard_files(tmp_path)
    shard = read_shard(file)
    assert shard.features is None
    assert sorted(shard.lengths) == [5, 6]
    assert shard.is_answer.sum() == 6
    assert shard.token_ids.tolist()[-3:] == [7, 8, STOP]


def test_prompts_that_are_used_up_end_the_corpus(tmp_path: Path) -> None:
    """Catches a writer that goes round for ever, or writes empty shards."""
    config = CorpusConfig(conversations_per_shard=2, greedy_share=1.0)
    prompts = GivenPrompts([[1, 5], [1, 6], [1, 7]], config)
    for _ in range(2):  # the second time nothing is left to do
        target = ScriptedTarget()
        write_corpus(tmp_path, 10**6, prompts, target.generate, None)
    assert count_answer_tokens(shard_files(tmp_path)) == 9
    assert not target.answer_jobs


def test_a_target_that_invents_nothing_is_refused(tmp_path: Path) -> None:
    """Catches a trace of tensors that cannot be joined."""
    config = CorpusConfig(conversations_per_shard=2)
    target = ScriptedTarget()

    def silent(jobs: list[GenerationJob]) -> list[GeneratedText]:
        return [GeneratedText(index, [STOP]) for index in range(len(jobs))]

    turns = InventedTurns(UserTurnTemplate(BEFORE, AFTER), config, silent, None, frozenset({STOP}))
    with pytest.raises(ValueError, match="empty user turns only; use --prompts or --corpus"):
        write_corpus(tmp_path, 10, turns, target.generate, None)


def test_openers_begin_their_share_of_the_turns(tmp_path: Path) -> None:
    """Catches first words that are lost from the prompt, given to every turn, or drawn anew in a resumed run."""
    asked: list[list[int]] = []

    def invent(jobs: list[GenerationJob]) -> list[GeneratedText]:
        asked.extend(job.prompt_ids for job in jobs)
        return [GeneratedText(index, [10 + job.seed % 97, STOP]) for index, job in enumerate(jobs)]

    config = CorpusConfig(conversations_per_shard=90, opener_share=0.5)
    template, openers = UserTurnTemplate(BEFORE, AFTER), [[50, 51], [60]]
    turns = InventedTurns(template, config, invent, None, frozenset({STOP}), openers)
    questions = [job.prompt_ids for job in turns.jobs(0)]
    counts = [asked.count([*BEFORE, *opener]) for opener in ([], *openers)]
    assert sum(counts) == 90
    assert 30 < counts[0] < 60
    assert min(counts[1:]) > 10
    for opener, count in zip(openers, counts[1:], strict=True):
        begun = [prompt for prompt in questions if prompt[: 2 + len(opener)] == [*BEFORE, *opener]]
        assert len(begun) == count
        assert all(len(prompt) == 2 + len(opener) + 1 + 1 for prompt in begun)
    assert [job.prompt_ids for job in turns.jobs(0)] == questions
