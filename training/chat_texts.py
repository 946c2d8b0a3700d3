"""Conversations from a JSONL file, tokenised as serving would: the prompt by the chat template, then the answer.

A line is `{"messages": [{"role", "content"}, ...]}`, or ShareGPT's `{"conversations": [{"from", "value"}, ...]}`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import TemplateError

from eyas.training.text_files import read_json_lines, shown_keys
from eyas.training.texts import Text

_ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_EXPECTED = '`messages` (a list of {"role", "content"}) or `conversations` (a list of {"from", "value"})'

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer a corpus needs."""

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def read_conversations(file: Path, option: str) -> Iterator[tuple[str, list[Message]]]:
    """Conversations with an answer each, one by one, and their places for error messages.

    Raises:
        ValueError: naming option, file, line and remedy.
    """
    for place, entry in read_json_lines(file, option):
        yield place, _messages(entry, place)


def tokenise_conversation(
    messages: list[Message], tokenizer: ChatTokenizer, stop_token_ids: Collection[int], place: str
) -> Text:
    """Tokens up to the end of the last answer; answers are the assistant's turns with their end tokens.

    Every prompt is what the template makes of the turns before an answer, up to where generation begins. Prompts and
    answers are tokenised apart, as the target reads the ones and writes the others, unless the text around a boundary
    has the same tokens as a whole.

    Args:
        stop_token_ids: which end an answer; what the template puts after one belongs to the next prompt.

    Raises:
        ValueError: for a template that refuses the roles, or renders the beginning of a conversation otherwise when it
            goes on.
    """
    ends = [tokenizer.decode([token_id]) for token_id in sorted(stop_token_ids)]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    whole = _rendered(messages[: turns[-1] + 1], tokenizer, False, place)
    token_ids: list[int] = []
    is_answer: list[bool] = []
    before, start = "", 0
    for turn in turns:
        prompt = _rendered(messages[:turn], tokenizer, True, place)
        answered = _rendered(messages[: turn + 1], tokenizer, False, place)
        if not answered.startswith(prompt) or not whole.startswith(answered) or len(prompt) < start:
            raise ValueError(
                f"{place} the target's chat template renders the turns up to message {turn + 1} otherwise when the "
                "conversation goes on (it is not prefix-stable), so that what serving would see is unknown; give "
                "conversations with a single answer at their end, or a --target with another template"
            )
        end = _end_of_answer(answered, len(prompt), ends)
        for piece, answers in ((whole[start : len(prompt)], False), (whole[len(prompt) : end], True)):
            ids = _continued(before, piece, tokenizer)
            token_ids += ids
            is_answer += [answers] * len(ids)
            before = piece
        start = end
    return Text(torch.tensor(token_ids), torch.tensor(is_answer))


def _end_of_answer(answered: str, begin: int, ends: list[str]) -> int:
    found = [place + len(end) for end in ends if end and (place := answered.rfind(end, begin)) >= 0]
    return max(found) if found else len(answered)


def _continued(before: str, piece: str, tokenizer: ChatTokenizer) -> list[int]:
    """Tokens of `piece`; after `before` if the two share none, because some tokenizers mark the begin of a text."""
    if not before:
        return tokenizer.encode(piece, add_special_tokens=False)
    first = tokenizer.encode(before, add_special_tokens=False)
    both = tokenizer.encode(before + piece, add_special_tokens=False)
    if both[: len(first)] == first:
        return both[len(first) :]
    return tokenizer.encode(piece, add_special_tokens=False)


def _rendered(messages: list[Message], tokenizer: ChatTokenizer, add_generation_prompt: bool, place: str) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(
            f"{place} the target's chat template refuses it: {error}; correct the line, or give a --target with a chat "
            "template that takes it"
        ) from error


def _messages(entry: dict[str, Any], place: str) -> list[Message]:
    if isinstance(entry.get("messages"), list):
        messages = check_messages(entry["messages"], place)
    elif isinstance(entry.get("conversations"), list):
        turns = enumerate(entry["conversations"], start=1)
        messages = check_messages([_from_sharegpt(turn, f"{place} turn {index}") for index, turn in turns], place)
    else:
        raise ValueError(f"{place} holds {shown_keys(entry)}; expected {_EXPECTED}")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(f"{place} has no assistant turn; add the answer, or let the target answer with --prompts")
    if "user" not in roles[: roles.index("assistant")]:
        raise ValueError(f"{place} begins with an assistant turn; begin with a user turn")
    return messages


def check_messages(messages: list[Any], place: str) -> list[Message]:
    """The given messages if each has a known role and text.

    Raises:
        ValueError: at the first that has not.
    """
    if not messages:
        raise ValueError(f"{place} has no message; remove the line or fill it")
    for index, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            found = shown_keys(dict(message)) if isinstance(message, Mapping) else "no object"
            raise ValueError(f"{place} message {index} holds {found}; expected `role` and `content`")
        if message["role"] not in _ROLES:
            known = ", ".join(_ROLES)
            raise ValueError(f"{place} message {index} has the role {message['role']!r}; use one of {known}")
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise ValueError(f"{place} message {index} has no content; give it text or remove the line")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _from_sharegpt(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
        found = shown_keys(dict(turn)) if isinstance(turn, Mapping) else "no object"
        raise ValueError(f"{place} holds {found}; expected `from` and `value`")
    role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise ValueError(f"{place} is from {turn['from']!r}; use one of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": role, "content": turn["value"]}
