"""Losslessness of the shipped model and head in float32: the first contract of the product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.deployments.local_engine import open_engine
from eyas.deployments.offline import OfflineOutput, OfflineRequest
from eyas.deployments.prompts import read_prompts
from eyas.deployments.settings import EngineSettings
from eyas.deployments.tokenizer import Tokenizer
from eyas.models.catalog import DEFAULT_TARGET, resolve_target
from eyas.workers.sampling import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
NUM_PROMPTS = 12
MAX_TOKENS = 48
TREES = [
    {"node_budget": 8, "draft_depth": 4, "width": 4},
    {"node_budget": 16, "draft_depth": 5, "width": 4, "page_size": 1, "num_pages": 8192},
    {"node_budget": 6, "draft_depth": 5, "width": 1, "max_prefill_tokens": 17},
]


def answers(temperature: float, **settings: object) -> list[OfflineOutput]:
    fields = {"dtype": "float32", "max_batch_size": 4, "threads_per_worker": 2, **settings}
    with open_engine(EngineSettings.model_validate(fields)) as (engine, tokenizer):
        prompts = read_prompts(PROMPTS, tokenizer)[:NUM_PROMPTS]
        return engine.generate(
            [
                OfflineRequest(prompt, SamplingParams(temperature, 1.0, index), MAX_TOKENS, tokenizer.eos_token_ids)
                for index, prompt in enumerate(prompts)
            ]
        )


def token_ids(outputs: list[OfflineOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> dict[float, list[list[int]]]:
    return {temperature: token_ids(answers(temperature, speculate=False)) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree['node_budget']}x{tree['draft_depth']}x{tree['width']}")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_write_the_plain_text(
    plain: dict[float, list[list[int]]], tree: dict[str, object], temperature: float
) -> None:
    """Any fault in masks, positions, compaction or shared noise changes the text; and a head that is never accepted
    proves nothing."""
    outputs = answers(temperature, **tree)
    assert token_ids(outputs) == plain[temperature]
    assert sum(output.num_step_tokens for output in outputs) > 1.2 * sum(output.num_steps for output in outputs)


def test_plain_text_is_what_transformers_writes(plain: dict[float, list[list[int]]]) -> None:
    """A decoder that is lossless against itself and wrong."""
    from transformers import AutoModelForCausalLM

    folder = resolve_target(DEFAULT_TARGET)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = read_prompts(PROMPTS, Tokenizer.from_folder(folder))[:NUM_PROMPTS]
    with torch.inference_mode():
        for prompt, expected in zip(prompts, plain[0.0], strict=True):
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
            )
            assert output[0, len(prompt) :].tolist() == expected


@pytest.mark.ray
def test_three_ranks_write_the_same_text(plain: dict[float, list[list[int]]]) -> None:
    """Sharding, the vocabulary gather, or ranks that decide for themselves."""
    ranks = {"tensor_parallel_size": 3, "threads_per_worker": 1}
    for temperature in (0.0, 1.0):
        assert token_ids(answers(temperature, **TREES[0], **ranks)) == plain[temperature]


def test_two_ranks_are_refused_with_the_sizes_that_work() -> None:
    """A crash in a worker, minutes later, for heads that cannot be split."""
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size: 2 cannot split 9 query heads.*sizes that work: \[1, 3\]"
    ):
        EngineSettings(tensor_parallel_size=2).engine_spec()
