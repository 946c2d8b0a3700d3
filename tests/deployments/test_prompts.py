"""Prompt files."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.deployments.prompts import read_prompts


class SpyTokenizer:
    """Encodes to character codes, and shows that the chat template was used by a leading 0."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return [0, *self.encode(messages[0]["content"])]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 must be a JSON object"),
        ('{"prompt": "a"}\n{"text": "a"}', "line 2 needs `turns`"),
        ('{"turns": []}', "line 1 needs `turns`"),
        ('{"prompt": ""}', "line 1 needs `turns`"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    """A skipped or misread line changes a benchmark silently."""
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A stack trace instead of the file's name."""
    with pytest.raises(ValueError, match=r"nowhere\.jsonl cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl", SpyTokenizer())  # type: ignore[arg-type]
