"""Prompts from a file that the target answers when it writes a corpus, pass after pass in orders of their own."""

from __future__ import annotations

import random
from functools import lru_cache

from eyas.training.generation import CorpusConfig, GenerationJob


class GivenPrompts:
    """The questions of every round. Each pass asks all prompts once.

    A prompt is answered greedily once at most, as it would get the same answer again: in the first pass the share of
    prompts that `greedy_share` says, in later ones as many of those that had no greedy answer, the others sampled.

    Args:
        prompts: token ids, no two alike.
    """

    def __init__(self, prompts: list[list[int]], config: CorpusConfig) -> None:
        self._prompts = prompts
        self._config = config
        self._order = lru_cache(maxsize=2)(self._order_of)
        ranks = self._shuffled("greedy")
        num_greedy = round(config.greedy_share * len(prompts))
        self._greedy_pass = {prompt: rank // num_greedy for rank, prompt in enumerate(ranks)} if num_greedy else {}

    def jobs(self, round_index: int) -> list[GenerationJob]:
        """What is asked in a round; nothing if all answers are greedy and every prompt has its own."""
        config, count = self._config, self._config.conversations_per_shard
        jobs: list[GenerationJob] = []
        for index in range(round_index * count, (round_index + 1) * count):
            pass_index, place = divmod(index, len(self._prompts))
            if config.greedy_share == 1.0 and pass_index:
                break
            prompt = self._order(pass_index)[place]
            is_greedy = self._greedy_pass.get(prompt) == pass_index
            jobs.append(
                GenerationJob(
                    prompt_ids=self._prompts[prompt],
                    temperature=0.0 if is_greedy else config.answer_temperature,
                    top_p=1.0,
                    seed=config.first_seed(round_index) + len(jobs),
                    max_tokens=config.max_answer_tokens,
                )
            )
        return jobs

    def _order_of(self, pass_index: int) -> list[int]:
        return self._shuffled(f"pass {pass_index}")

    def _shuffled(self, purpose: str) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._config.seed} {purpose}").shuffle(order)
        return order
