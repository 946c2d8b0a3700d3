from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.training.chat_texts import Message, read_conversations, tokenise_conversation
from eyas.training.texts import Text


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


IM_END, IM_START = 258, 259
PLACE = "--corpus: x, line 7:"
TURNS = [
    {"role": "user", "content": "Ab?"},
    {"role": "assistant", "content": "bbc"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture
def new_tokenizer(save_chat_tokenizer: Callable[..., None], tmp_path: Path) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        from transformers import AutoTokenizer

        save_chat_tokenizer(tmp_path / "tokenizer", **options)
        return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    return make


def spelled(text: Text, tokenizer: Any) -> list[tuple[str, bool]]:
    """Runs of prompt and answer tokens as text."""
    runs: list[tuple[list[int], bool]] = []
    for token_id, answers in zip(text.token_ids.tolist(), text.is_answer.tolist(), strict=True):
        if not runs or runs[-1][1] != answers:
            runs.append(([], answers))
        runs[-1][0].append(token_id)
    return [(tokenizer.decode(ids), answers) for ids, answers in runs]


def test_answers_are_the_turns_of_the_assistant(new_tokenizer: Callable[..., Any]) -> None:
    """Catches an end token or the line break behind it on the wrong side, a default system prompt that is lost, and a
    user's last turn that is kept although nothing answers it."""
    tokenizer = new_tokenizer()
    text = tokenise_conversation([*TURNS, {"role": "user", "content": "Bye"}], tokenizer, {IM_END}, PLACE)
    assert spelled(text, tokenizer) == [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAb?<|im_end|>\n<|im_start|>assistant\n", False),
        ("bbc<|im_end|>", True),
        ("\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n", False),
        ("No.<|im_end|>", True),
    ]


def test_tokens_are_those_of_serving(new_tokenizer: Callable[..., Any]) -> None:
    """Catches a prompt with tokens the server would not see: text around a boundary that is merged into one token."""
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}b"
        "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = new_tokenizer(template=template)
    prompt = tokenizer.apply_chat_template(TURNS[:1], tokenize=True, add_generation_prompt=True, return_dict=False)
    text = tokenise_conversation(TURNS[:2], tokenizer, {IM_END}, PLACE)
    ids, mask = text.token_ids.tolist(), text.is_answer.tolist()
    assert ids[: mask.index(True)] == prompt
    assert tokenizer.decode(ids[mask.index(True) :]) == "bbc<|im_end|>"


class MarkingTokenizer:
    """Marks the beginning of every text it is given, as tokenizers made with SentencePiece do."""

    def apply_chat_template(self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(f"[{x['content']}]" if x["role"] == "user" else f"{x['content']}." for x in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0, *(ord(character) for character in text)]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids)


def test_only_the_beginning_of_a_conversation_is_marked() -> None:
    """Catches the mark of a text's beginning before every answer, where the target never writes it."""
    text = tokenise_conversation(TURNS, MarkingTokenizer(), {ord(".")}, PLACE)
    assert text.token_ids.tolist() == [0, *(ord(character) for character in "[Ab?]bbc.[More]No..")]


def test_an_answer_without_an_end_token_ends_with_its_turn(new_tokenizer: Callable[..., Any]) -> None:
    """Catches a template without end tokens, whose answers would be taken for empty."""
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = new_tokenizer(template=template)
    text = tokenise_conversation(TURNS[:2], tokenizer, {IM_END}, PLACE)
    assert spelled(text, tokenizer) == [("user: Ab?\nassistant:", False), (" bbc\n", True)]


SHORTENED = (
    "{% for message in messages %}{% if message.role == 'user' or loop.last %}{{ message.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
WHOLE = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
UNSTABLE = {
    "the number of messages stands first": ("{{ messages | length }}" + WHOLE, 2),
    "earlier answers are shortened": (SHORTENED, 2),
    "an answer does not begin with the generation prompt": (
        WHOLE + "{% if add_generation_prompt %}answer:{% endif %}",
        2,
    ),
    "a prompt ends before the last answer": (
        "{% if add_generation_prompt %}{{ messages[0].content }}{% else %}" + WHOLE + "{% endif %}",
        4,
    ),
}


@pytest.mark.parametrize(("template", "message"), UNSTABLE.values(), ids=UNSTABLE)
def test_a_template_that_is_not_prefix_stable(template: str, message: int, new_tokenizer: Callable[..., Any]) -> None:
    """Catches answers marked at places that are not theirs."""
    whole = (
        f"{PLACE} the target's chat template renders the turns up to message {message} otherwise when the conversation "
        "goes on (it is not prefix-stable), so that what serving would see is unknown; give conversations with a "
        "single answer at their end, or a --target with another template"
    )
    with pytest.raises(ValueError, match=exactly(whole)):
        tokenise_conversation(TURNS, new_tokenizer(template=template), {IM_END}, PLACE)


def test_a_single_answer_may_change_when_the_conversation_goes_on(new_tokenizer: Callable[..., Any]) -> None:
    """Catches a remedy that does not work: templates that shorten earlier answers take a single one."""
    tokenizer = new_tokenizer(template=SHORTENED)
    text = tokenise_conversation(TURNS[:2], tokenizer, {IM_END}, PLACE)
    assert spelled(text, tokenizer) == [("Ab?<|im_end|>", False), ("bbc<|im_end|>", True)]


def test_what_a_template_refuses(new_tokenizer: Callable[..., Any]) -> None:
    """Catches a trace of the template language's."""
    tokenizer = new_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    whole = (
        f"{PLACE} the target's chat template refuses it: roles must alternate; correct the line, or give a --target "
        "with a chat template that takes it"
    )
    with pytest.raises(ValueError, match=exactly(whole)):
        tokenise_conversation(TURNS, tokenizer, {IM_END}, PLACE)


@pytest.mark.model
def test_answers_of_the_demo_model() -> None:
    """Catches masks that are off on a real template, with its default system prompt and line breaks after turns."""
    from transformers import AutoTokenizer

    from eyas.models.catalog import DEFAULT_TARGET, resolve_target

    tokenizer = AutoTokenizer.from_pretrained(resolve_target(DEFAULT_TARGET))
    text = tokenise_conversation(TURNS, tokenizer, {tokenizer.eos_token_id}, PLACE)
    first, *others = spelled(text, tokenizer)
    assert first[0].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert first[0].endswith("<|im_end|>\n<|im_start|>user\nAb?<|im_end|>\n<|im_start|>assistant\n")
    assert others == [
        ("bbc<|im_end|>", True),
        ("\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n", False),
        ("No.<|im_end|>", True),
    ]
    whole = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    assert text.token_ids.tolist() == whole[: text.token_ids.shape[0]]


def read(tmp_path: Path, *entries: Any) -> list[tuple[str, list[Message]]]:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return list(read_conversations(file, "--corpus"))


def test_both_forms_of_a_line(tmp_path: Path) -> None:
    """Catches ShareGPT's roles taken for the template's, and keys beside the conversation that are refused."""
    sharegpt = [{"from": "human", "value": "Ab?"}, {"from": "gpt", "value": "bbc"}]
    entries = read(tmp_path, {"messages": TURNS, "id": 1}, {"conversations": sharegpt, "source": "x"})
    assert [messages for _, messages in entries] == [TURNS, TURNS[:2]]


def turn(role: Any = "user", content: Any = "a") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"text": "a", "id": 1},
            'holds `text`, `id`; expected `messages` (a list of {"role", "content"}) or `conversations` (a list of '
            '{"from", "value"})',
        ),
        (
            {"messages": "a"},
            'holds `messages`; expected `messages` (a list of {"role", "content"}) or `conversations` (a list of '
            '{"from", "value"})',
        ),
        (
            {},
            'holds no key; expected `messages` (a list of {"role", "content"}) or `conversations` (a list of {"from", '
            '"value"})',
        ),
        ({"messages": []}, "has no message; remove the line or fill it"),
        ({"messages": ["a"]}, "message 1 holds no object; expected `role` and `content`"),
        ({"messages": [{"role": "user"}]}, "message 1 holds `role`; expected `role` and `content`"),
        (
            {"messages": [turn(), turn("bot")]},
            "message 2 has the role 'bot'; use one of system, user, assistant",
        ),
        ({"messages": [turn(7)]}, "message 1 has the role 7; use one of system, user, assistant"),
        ({"messages": [turn(content=" ")]}, "message 1 has no content; give it text or remove the line"),
        ({"messages": [turn(content=None)]}, "message 1 has no content; give it text or remove the line"),
        (
            {"messages": [turn(), turn("system")]},
            "has no assistant turn; add the answer, or let the target answer with --prompts",
        ),
        ({"messages": [turn("assistant"), turn()]}, "begins with an assistant turn; begin with a user turn"),
        ({"conversations": [{"role": "user"}]}, "turn 1 holds `role`; expected `from` and `value`"),
        (
            {"conversations": [{"from": "bing", "value": "a"}]},
            "turn 1 is from 'bing'; use one of system, human, user, gpt, assistant",
        ),
        (
            {"conversations": [{"from": ["gpt"], "value": "a"}]},
            "turn 1 is from ['gpt']; use one of system, human, user, gpt, assistant",
        ),
    ],
)
def test_lines_that_are_no_conversation(tmp_path: Path, entry: dict[str, Any], expected: str) -> None:
    """Catches a line that is skipped or misread, and an error without its place, what was found and the remedy."""
    whole = f"--corpus: {tmp_path / 'chats.jsonl'}, line 2: {expected}"
    with pytest.raises(ValueError, match=exactly(whole)):
        read(tmp_path, {"messages": TURNS}, entry)
