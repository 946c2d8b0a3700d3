from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyas.training.text_files import read_json_lines, read_text


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--corpus: FILE does not exist; check the path"),
        (b"", "--corpus: FILE is empty or holds blank lines only; put texts into it"),
        (b" \n\n\t\n", "--corpus: FILE is empty or holds blank lines only; put texts into it"),
        (b"\xef\xbb\xbf\n", "--corpus: FILE is empty or holds blank lines only; put texts into it"),
        (b"text\nPK\0\3", "--corpus: FILE, line 2: is binary (a NUL byte); give UTF-8 text"),
        (b"text\n\nGr\xfc\xdfe", "--corpus: FILE, line 3: is not UTF-8; convert the file to UTF-8"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes | None, message: str) -> None:
    """Catches a trace of Python's instead of the place and the remedy, and a line counted from 0."""
    file = tmp_path / "texts"
    if content is not None:
        file.write_bytes(content)
    whole = message.replace("FILE", str(file))
    with pytest.raises(ValueError, match=exactly(whole)):
        read_text(file, "--corpus")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Catches a folder of chats that ends in a trace."""
    whole = f"--prompts: {tmp_path} cannot be read (Is a directory); check the path and its permissions"
    with pytest.raises(ValueError, match=exactly(whole)):
        read_text(tmp_path, "--prompts")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": ', "line 2: is not JSON (Expecting value); write one JSON object a line (JSONL)"),
        ('[\n{"a": 1}\n]', "line 1: is not JSON (Expecting value); write one JSON object a line (JSONL)"),
        ('\n[{"a": 1}]', "line 2: holds a JSON array; write one JSON object a line (JSONL)"),
        ("3.5", "line 1: holds a JSON number; write one JSON object a line (JSONL)"),
        ('"a"', "line 1: holds a JSON string; write one JSON object a line (JSONL)"),
        ("true", "line 1: holds a JSON boolean; write one JSON object a line (JSONL)"),
        ("[" * 100_000, "line 1: is not JSON (nested too deeply); write one JSON object a line (JSONL)"),
        (
            '{"a": "\\ud83e\\udd85"}\n{"a": ["\\ud83e"]}',
            "line 2: holds half a character (a lone \\u escape of d800 to dfff); correct the line",
        ),
        ("null", "line 1: holds a JSON null; write one JSON object a line (JSONL)"),
    ],
)
def test_lines_that_are_no_objects(tmp_path: Path, content: str, message: str) -> None:
    """Catches a whole array on one line that is taken for a conversation, and blank lines that shift the number."""
    file = tmp_path / "chats.jsonl"
    file.write_text(content, encoding="utf-8")
    whole = f"--corpus: {file}, {message}"
    with pytest.raises(ValueError, match=exactly(whole)):
        list(read_json_lines(file, "--corpus"))


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    """Catches a string cut in two at a separator that only Python takes for a line's end, and a byte order mark."""
    file = tmp_path / "chats.jsonl"
    file.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\r\n{"a": 2}\n'.encode())
    lines = list(read_json_lines(file, "--corpus"))
    assert lines == [(f"--corpus: {file}, line 1:", {"a": "x\u2028y"}), (f"--corpus: {file}, line 3:", {"a": 2})]
