"""What kind of prompt each line of a prompt file holds: its `category`, as MT-bench names one."""

from __future__ import annotations

from pathlib import Path

from eyas.training.text_files import read_json_lines


def read_categories(file: Path, option: str = "--prompts") -> list[str | None]:
    """The category of each prompt that `read_prompts` reads from the file; None where a line names none.

    Raises:
        ValueError: naming option, file and line of a category that is no text.
    """
    categories: list[str | None] = []
    for place, entry in read_json_lines(file, option):
        category = entry.get("category")
        if category is not None and not isinstance(category, str):
            raise ValueError(f"{place} has the category {category!r}; make it a string or leave it out")
        categories.append(category)
    return categories
