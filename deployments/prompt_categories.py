"""What kind of prompt each line of a prompt file holds: its `category`, as MT-bench names one."""

from __future__ import annotations

import json
from pathlib import Path


def read_categories(file: Path) -> list[str | None]:
    """The category of each prompt, in order; None where a line names none.

    Args:
        file: one that `read_prompts` has read, so that every line that is not blank holds a JSON object.

    Raises:
        ValueError: naming file and line of a category that is no text.
    """
    categories: list[str | None] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        category = json.loads(line).get("category")
        if category is not None and not isinstance(category, str):
            raise ValueError(f"--prompts: {file}, line {number}: `category` must be a string, got {category!r}")
        categories.append(category)
    return categories
