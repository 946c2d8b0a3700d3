from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.training.openers import OPENERS

ROOT = Path(__file__).parents[2]
MEASURED_WITH = (ROOT / "benchmarks" / "prompts.jsonl", ROOT.parent / "shared" / "data" / "mt_bench.jsonl")


def test_no_opener_is_given_twice() -> None:
    """Catches a kind of request that comes up more often than the others."""
    assert len(set(OPENERS)) == len(OPENERS)


@pytest.mark.parametrize("file", MEASURED_WITH, ids=lambda file: file.stem)
def test_no_opener_begins_a_prompt_that_heads_are_measured_with(file: Path) -> None:
    """Catches training texts made to resemble the prompts of an evaluation."""
    if not file.exists():
        pytest.skip(f"{file.name} is not part of the project and not at hand")
    prompts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
    long = [opener for opener in OPENERS if len(opener.split()) >= 3]
    assert [(opener, prompt) for opener in long for prompt in prompts if prompt.startswith(opener)] == []
