"""Categories of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.deployments.prompt_categories import read_categories


def test_categories_keep_the_order_of_their_prompts(tmp_path: Path) -> None:
    """Catches a category given to the next prompt after a blank line, or made up where there is none."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"category": "math", "prompt": "a\u2028b"}\n \n{"prompt": "b"}\r\n{"category": "code", "turns": []}'
    )
    assert read_categories(file) == ["math", None, "code"]


def test_a_category_must_be_text(tmp_path: Path) -> None:
    """Catches numbers and lists that become keys of a report, and an error that does not name the line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "category": 3}')
    with pytest.raises(ValueError, match=r"--prompts: .*prompts.jsonl, line 2: has the category 3; make it a string"):
        read_categories(file)
