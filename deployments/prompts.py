"""Prompt files: one JSON object a line, with `turns` (the first is used), `messages`, or `prompt`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.deployments.tokenizer import Tokenizer


def read_prompts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt; `turns` and `messages` go through the chat template, `prompt` does not.

    Raises:
        ValueError: naming file, line and key.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # strings may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {file} cannot be read: {error}") from None
    prompts = [
        _prompt_ids(line, f"prompts: {file} line {number}", tokenizer)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"prompts: {file} holds no prompt")
    return prompts


def _prompt_ids(line: str, place: str, tokenizer: Tokenizer) -> list[int]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from None
    if not isinstance(entry, Mapping):
        raise ValueError(f"{place} must be a JSON object")
    if isinstance(entry.get("prompt"), str) and entry["prompt"]:
        return tokenizer.encode(entry["prompt"])
    messages: Any = entry.get("messages")
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        messages = [{"role": "user", "content": turns[0]}]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place} needs `turns` (a list of strings), `messages` or `prompt`")
    return tokenizer.apply_chat_template(messages)
