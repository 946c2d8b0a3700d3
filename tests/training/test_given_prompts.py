from __future__ import annotations

from collections import Counter

from eyas.training.generation import CorpusConfig, GenerationJob
from eyas.training.given_prompts import GivenPrompts

PROMPTS = [[prompt, 5] for prompt in range(10)]


def asked(num_rounds: int, **options: float) -> list[GenerationJob]:
    config = CorpusConfig(conversations_per_shard=4, **options)  # type: ignore[arg-type]
    prompts = GivenPrompts(PROMPTS, config)
    return [job for index in range(num_rounds) for job in prompts.jobs(index)]


def test_a_pass_asks_every_prompt_once() -> None:
    """Catches prompts left out or doubled where rounds and passes end at different places, and passes in one order."""
    jobs = asked(5)
    passes = [[job.prompt_ids[0] for job in jobs[start : start + 10]] for start in (0, 10)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert jobs == asked(5)
    assert [job.prompt_ids for job in asked(5, seed=1)] != [job.prompt_ids for job in jobs]


def test_no_prompt_is_answered_greedily_twice() -> None:
    """Catches answers that are the same again, and sampled ones that share a seed."""
    jobs = asked(10)
    greedy = [job for job in jobs if job.temperature == 0]
    assert Counter(job.prompt_ids[0] for job in greedy) == Counter(range(10))
    assert len({job.seed for job in jobs}) == len(jobs)
    assert {job.temperature for job in jobs} == {0.0, 0.7}


def test_the_greedy_share_holds_from_the_first_pass() -> None:
    """Catches greedy answers that all come first, so that a corpus that ends early has no other."""
    jobs = asked(5)
    assert [sum(job.temperature == 0 for job in jobs[start : start + 10]) for start in (0, 10)] == [6, 4]
    assert 0 < sum(job.temperature == 0 for job in jobs[:5]) < 5
    assert not [job for job in asked(5, greedy_share=0.0) if job.temperature == 0]


def test_greedy_answers_alone_come_to_an_end() -> None:
    """Catches an endless corpus of repeated answers, and a last round that is dropped because it is not full."""
    prompts = GivenPrompts(PROMPTS, CorpusConfig(conversations_per_shard=4, greedy_share=1.0))
    assert [len(prompts.jobs(index)) for index in range(4)] == [4, 4, 2, 0]
    assert all(job.temperature == 0 for index in range(3) for job in prompts.jobs(index))
