"""Prompt files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyas.deployments.api_error import ApiError
from eyas.deployments.prompts import read_prompts


class SpyTokenizer:
    """Encodes to character codes, and shows that the chat template was used by a leading 0."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        content = messages[0]["content"]
        if content == "refused":
            raise ApiError(400, "the roles are wrong", "messages", "chat_template_error")
        if content == "no template":
            raise ApiError(400, "use /v1/completions", "messages", "no_chat_template")
        return [0, *self.encode(content)]


def read(tmp_path: Path, text: str) -> list[list[int]]:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    return read_prompts(file, SpyTokenizer())  # type: ignore[arg-type]


def test_every_form_of_line(tmp_path: Path) -> None:
    """Turns and messages go through the chat template, a bare prompt does not, blank lines do not count."""
    text = '{"turns": ["ab", "c"]}\n\n{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "b"}\n'
    assert read(tmp_path, text) == [[0, 97, 98], [0, 97], [98]]


def test_a_string_may_hold_line_separators(tmp_path: Path) -> None:
    """A prompt cut in two at a separator that only Python takes for the end of a line."""
    assert read(tmp_path, '{"prompt": "a\u2028b"}\r\n') == [[97, 0x2028, 98]]


EXPECTED = 'expected `turns` (a list of strings), `messages` (a list of {"role", "content"}) or `prompt` (a string)'
ASSISTANT_LAST = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " is empty or holds blank lines only; put texts into it"),
        ("\n \n", " is empty or holds blank lines only; put texts into it"),
        ('{"prompt": "\0"}', ", line 1: is binary (a NUL byte); give UTF-8 text"),
        (
            "{",
            ", line 1: is not JSON (Expecting property name enclosed in double quotes); write one JSON object a line "
            "(JSONL)",
        ),
        ("[1]", ", line 1: holds a JSON array; write one JSON object a line (JSONL)"),
        ('{"prompt": "a"}\n{"text": "a"}', f", line 2: holds `text`; {EXPECTED}"),
        ('{"turns": []}', f", line 1: holds an empty `turns`; {EXPECTED}"),
        ('{"turns": [" "]}', f", line 1: holds an empty `turns`; {EXPECTED}"),
        ('{"prompt": ""}', f", line 1: holds an empty `prompt`; {EXPECTED}"),
        ('{"messages": []}', ", line 1: has no message; remove the line or fill it"),
        (
            '{"messages": [{"role": "bot", "content": "a"}]}',
            ", line 1: message 1 has the role 'bot'; use one of system, user, assistant",
        ),
        (
            '{"messages": [{"role": "user", "content": ""}]}',
            ", line 1: message 1 has no content; give it text or remove the line",
        ),
        (ASSISTANT_LAST, ", line 1: ends with a turn of the assistant; end with a user turn, which the target answers"),
        (
            '{"messages": [{"role": "user", "content": "refused"}]}',
            ", line 1: the roles are wrong; use `prompt`, or correct the line",
        ),
        (
            '{"messages": [{"role": "user", "content": "no template"}]}',
            ", line 1: the model has no chat template; use `prompt`, or correct the line",
        ),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    """Catches a skipped or misread line, which changes a benchmark silently, and an error without place or remedy."""
    whole = f"--prompts: {tmp_path / 'prompts.jsonl'}{message}"
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A stack trace instead of the file's name."""
    with pytest.raises(ValueError, match=r"^--prompts: .*nowhere\.jsonl does not exist; check the path$"):
        read_prompts(tmp_path / "nowhere.jsonl", SpyTokenizer())  # type: ignore[arg-type]
