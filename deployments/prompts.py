"""Prompt files: one JSON object a line, with `turns` (the first is used), `messages`, or `prompt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.deployments.api_error import ApiError
from eyas.deployments.tokenizer import Tokenizer
from eyas.training.chat_texts import check_messages
from eyas.training.text_files import read_json_lines, shown_keys

_EXPECTED = '`turns` (a list of strings), `messages` (a list of {"role", "content"}) or `prompt` (a string)'


def read_prompts(file: Path, tokenizer: Tokenizer, option: str = "--prompts") -> list[list[int]]:
    """Token ids of every prompt; `turns` and `messages` go through the chat template, `prompt` does not.

    Args:
        option: what the user named the file by, for error messages.

    Raises:
        ValueError: naming option, file, line and key.
    """
    return [_prompt_ids(entry, place, tokenizer) for place, entry in read_json_lines(file, option)]


def _prompt_ids(entry: dict[str, Any], place: str, tokenizer: Tokenizer) -> list[int]:
    prompt, turns, messages = (entry.get(key) for key in ("prompt", "turns", "messages"))
    if isinstance(prompt, str) and prompt:
        return tokenizer.encode(prompt)
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
        messages = [{"role": "user", "content": turns[0]}]
    if not isinstance(messages, list):
        found = next((f"an empty `{key}`" for key in ("prompt", "turns") if key in entry), shown_keys(entry))
        raise ValueError(f"{place} holds {found}; expected {_EXPECTED}")
    messages = check_messages(messages, place)
    if messages[-1]["role"] != "user":
        raise ValueError(
            f"{place} ends with a turn of the {messages[-1]['role']}; end with a user turn, which the target answers"
        )
    try:
        return tokenizer.apply_chat_template(messages)
    except ApiError as error:
        reason = "the model has no chat template" if error.code == "no_chat_template" else error.message
        raise ValueError(f"{place} {reason}; use `prompt`, or correct the line") from error
