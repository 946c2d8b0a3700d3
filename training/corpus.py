"""The target writes a corpus: it invents user turns or is given prompts, answers them, and its hidden states are kept.

Invented turns are sampled after the bare chat template up to the point where a user would speak, most of them with
their first words given; answers are greedy in a
stated share and sampled otherwise. One shard is one round of conversations; a shard file appears complete or not at
all, so an interrupted run goes on with the next one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.training.chat_texts import ChatTokenizer
from eyas.training.generation import CorpusConfig, Generate, GenerationJob
from eyas.training.recording import FeatureRecorder
from eyas.training.shard import Shard, count_answer_tokens, save_shard, shard_files
from eyas.training.text_corpus import shard_file

_MARK = "@@USER@@"


class Questions(Protocol):
    """What the target answers."""

    def jobs(self, round_index: int) -> list[GenerationJob]:
        """The questions of a round; none if there are no more."""
        ...


@dataclass(frozen=True, slots=True)
class UserTurnTemplate:
    """Token ids around a user turn: `before + turn + after`, then the answer."""

    before: list[int]
    after: list[int]

    @staticmethod
    def of(tokenizer: ChatTokenizer) -> UserTurnTemplate:
        """Raises `ValueError` if the tokenizer's chat template does not show the user's message."""
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, found, after = text.partition(_MARK)
        if not found:
            raise ValueError("the target's chat template does not show the user's message; use --prompts or --corpus")
        return UserTurnTemplate(
            before=tokenizer.encode(before, add_special_tokens=False),
            after=tokenizer.encode(after, add_special_tokens=False),
        )


@dataclass(frozen=True, slots=True)
class InventedTurns:
    """`Questions` the target makes up itself.

    Args:
        openers: words that turns begin with, as token ids.
    """

    template: UserTurnTemplate
    config: CorpusConfig
    generate: Generate
    recorder: FeatureRecorder | None
    stop_token_ids: frozenset[int]
    openers: Sequence[list[int]] = ()

    def jobs(self, round_index: int) -> list[GenerationJob]:
        """Sample user turns; raises `ValueError` if all of them are empty."""
        template, config = self.template, self.config
        count, first_seed = config.conversations_per_shard, config.first_seed(round_index)
        openers = self._chosen_openers(count, first_seed)
        turns = self.generate(
            [
                GenerationJob(
                    [*template.before, *opener], config.user_temperature, config.user_top_p, first_seed + index,
                    config.max_user_tokens,
                )
                for index, opener in enumerate(openers)
            ]
        )  # fmt: skip
        if self.recorder is not None:
            self.recorder.clear()
        prompts = {
            (*opener, *self._without_stop(turn.token_ids)) for opener, turn in zip(openers, turns, strict=True)
        } - {()}
        if not prompts:
            raise ValueError("the target invents empty user turns only; use --prompts or --corpus")
        # Sorted for the same order in every run, then shuffled: else the turns that come first in the alphabet would
        # get all the greedy answers.
        ordered = sorted(prompts)
        random.Random(first_seed).shuffle(ordered)
        num_greedy = round(config.greedy_share * len(prompts))
        return [
            GenerationJob(
                prompt_ids=[*template.before, *prompt, *template.after],
                temperature=0.0 if index < num_greedy else config.answer_temperature,
                top_p=1.0,
                seed=first_seed + index,
                max_tokens=config.max_answer_tokens,
            )
            for index, prompt in enumerate(ordered)
        ]

    def _chosen_openers(self, count: int, seed: int) -> list[list[int]]:
        if not self.openers:
            return [[]] * count
        draws = random.Random(seed)
        return [draws.choice(self.openers) if draws.random() < self.config.opener_share else [] for _ in range(count)]

    def _without_stop(self, token_ids: list[int]) -> list[int]:
        return token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids


@dataclass(frozen=True, slots=True)
class Writer:
    """One of several processes that share a corpus: it writes every `count`-th shard, beginning with `index`."""

    index: int = 0
    count: int = 1


def write_corpus(
    folder: Path,
    num_tokens: int,
    questions: Questions,
    generate: Generate,
    recorder: FeatureRecorder | None,
    writer: Writer = Writer(),
) -> None:
    """Write this writer's shards until the corpus holds `num_tokens` answer tokens; resumes where it stopped.

    Ends earlier where there are no more questions.

    Args:
        recorder: collects the target's states; None writes texts alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    round_index = writer.index
    while count_answer_tokens(shard_files(folder)) < num_tokens:
        file = shard_file(folder, round_index)
        if not file.exists():
            jobs = questions.jobs(round_index)
            if not jobs:
                return
            save_shard(_answered(jobs, generate, recorder), file)
        round_index += writer.count


def _answered(jobs: list[GenerationJob], generate: Generate, recorder: FeatureRecorder | None) -> Shard:
    answers = generate(jobs)
    tokens, answered, lengths = [], [], []
    features: list[Tensor] = []
    for job, answer in zip(jobs, answers, strict=True):
        text = [*job.prompt_ids, *answer.token_ids]
        length = len(text)
        if recorder is not None:
            recorded = recorder.take(answer.request_id)
            length = min(length, recorded.shape[0])  # the last token of a capped answer was never committed
            features.append(recorded[:length].cpu())
        tokens.append(torch.tensor(text[:length]))
        answered.append(torch.arange(length) >= len(job.prompt_ids))
        lengths.append(length)
    return Shard(torch.cat(tokens), torch.cat(answered), lengths, torch.cat(features) if features else None)
