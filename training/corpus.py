"""The target writes its own corpus: it invents user turns, answers them, and its hidden states are kept.

User turns are sampled from the bare chat template up to the point where a user would speak; answers are greedy in a
stated share and sampled otherwise. One shard is one round of conversations; a shard file appears complete or not at
all, so an interrupted run goes on with the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eyas.training.recording import FeatureRecorder
from eyas.training.shard import Shard, count_answer_tokens, save_shard, shard_files

_MARK = "@@USER@@"
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One text the target shall continue; the stop token is part of the result."""

    prompt_ids: list[int]
    temperature: float
    top_p: float
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """`request_id` finds the text's features in the recorder."""

    request_id: int
    token_ids: list[int]


Generate = Callable[[list[GenerationJob]], list[GeneratedText]]


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer the corpus needs."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """How much to write, and how.

    Args:
        num_tokens: answer tokens to write in all.
        greedy_share: part of the answers written at temperature 0; the others at `answer_temperature`.
    """

    num_tokens: int = 1_000_000
    conversations_per_shard: int = 192
    max_user_tokens: int = 64
    max_answer_tokens: int = 192
    user_temperature: float = 1.0
    user_top_p: float = 0.95
    greedy_share: float = 0.6
    answer_temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share: must be between 0 and 1, got {self.greedy_share}")
        if min(self.num_tokens, self.conversations_per_shard, self.max_user_tokens, self.max_answer_tokens) < 1:
            raise ValueError("num_tokens, conversations_per_shard, max_user_tokens and max_answer_tokens must be >= 1")


@dataclass(frozen=True, slots=True)
class UserTurnTemplate:
    """Token ids around a user turn: `before + turn + after`, then the answer."""

    before: list[int]
    after: list[int]

    @staticmethod
    def of(tokenizer: ChatTokenizer) -> UserTurnTemplate:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, found, after = text.partition(_MARK)
        if not found:
            raise ValueError("the target's chat template does not show the user's message")
        return UserTurnTemplate(
            before=tokenizer.encode(before, add_special_tokens=False),
            after=tokenizer.encode(after, add_special_tokens=False),
        )


@dataclass(frozen=True, slots=True)
class Writer:
    """One of several processes that share a corpus: it writes every `count`-th shard, beginning with `index`."""

    index: int = 0
    count: int = 1


def write_corpus(
    folder: Path,
    config: CorpusConfig,
    template: UserTurnTemplate,
    generate: Generate,
    recorder: FeatureRecorder,
    stop_token_id: int,
    writer: Writer = Writer(),
) -> None:
    """Write this writer's shards until the corpus holds `config.num_tokens` answer tokens; resumes where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    round_index = writer.index
    while count_answer_tokens(shard_files(folder)) < config.num_tokens:
        file = folder / f"shard-{round_index:05d}.safetensors"
        if not file.exists():
            save_shard(_write_round(round_index, config, template, generate, recorder, stop_token_id), file)
        round_index += writer.count


def _write_round(
    round_index: int,
    config: CorpusConfig,
    template: UserTurnTemplate,
    generate: Generate,
    recorder: FeatureRecorder,
    stop_token_id: int,
) -> Shard:
    count = config.conversations_per_shard
    first_seed = config.seed * _SEED_STRIDE + round_index * count
    turns = generate(
        [
            GenerationJob(
                template.before, config.user_temperature, config.user_top_p, first_seed + index, config.max_user_tokens
            )
            for index in range(count)
        ]
    )
    recorder.clear()
    prompts = {tuple(_without_stop(turn.token_ids, stop_token_id)) for turn in turns} - {()}
    # Sorted for the same order in every run, then shuffled: else the turns that come first in the alphabet would get
    # all the greedy answers.
    ordered = sorted(prompts)
    random.Random(first_seed).shuffle(ordered)
    num_greedy = round(config.greedy_share * len(prompts))
    jobs = [
        GenerationJob(
            prompt_ids=[*template.before, *prompt, *template.after],
            temperature=0.0 if index < num_greedy else config.answer_temperature,
            top_p=1.0,
            seed=first_seed + index,
            max_tokens=config.max_answer_tokens,
        )
        for index, prompt in enumerate(ordered)
    ]
    answers = generate(jobs)
    tokens, answered, features, lengths = [], [], [], []
    for job, answer in zip(jobs, answers, strict=True):
        text = [*job.prompt_ids, *answer.token_ids]
        recorded = recorder.take(answer.request_id)
        length = min(len(text), recorded.shape[0])  # the last token of a capped answer was never committed
        tokens.append(torch.tensor(text[:length]))
        features.append(recorded[:length])
        answered.append(torch.arange(length) >= len(job.prompt_ids))
        lengths.append(length)
    return Shard(torch.cat(tokens), torch.cat(answered), lengths, torch.cat(features))


def _without_stop(token_ids: list[int], stop_token_id: int) -> list[int]:
    return token_ids[:-1] if token_ids and token_ids[-1] == stop_token_id else token_ids
