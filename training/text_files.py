"""Files a user wrote: read whole, with errors that name the option, the file, the line and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_bytes(file: Path, option: str) -> bytes:
    """Bytes of a UTF-8 text file that holds more than blanks.

    Raises:
        ValueError: if it is missing, empty or not text.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{option}: {file} does not exist; check the path") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{option}: {file} cannot be read ({reason}); check the path and its permissions") from None
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise ValueError(f"{option}: {file}, line {line}: is binary (a NUL byte); give UTF-8 text")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{option}: {file}, line {line}: is not UTF-8; convert the file to UTF-8") from None
    if not text.removeprefix("\ufeff").strip():
        raise ValueError(f"{option}: {file} is empty or holds blank lines only; put texts into it")
    return content


def read_text(file: Path, option: str) -> str:
    """Text of a UTF-8 file, without its byte order mark. Raises as `read_bytes` does."""
    return read_bytes(file, option).decode("utf-8-sig")


def read_json_lines(file: Path, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file one by one, with their places for error messages; blank lines do not count.

    Raises:
        ValueError: as `read_bytes` does, and for a line that is not a JSON object.
    """
    for number, line in enumerate(read_text(file, option).split("\n"), start=1):  # strings may hold other separators
        if not line.strip():
            continue
        place = f"{option}: {file}, line {number}:"
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            raise ValueError(f"{place} is not JSON ({reason}); write one JSON object a line (JSONL)") from None
        if _SURROGATE.search(line) and not _is_encodable(entry):
            raise ValueError(f"{place} holds half a character (a lone \\u escape of d800 to dfff); correct the line")
        if not isinstance(entry, dict):
            raise ValueError(f"{place} holds a JSON {_json_type(entry)}; write one JSON object a line (JSONL)")
        yield place, entry


def shown_keys(entry: dict[str, Any]) -> str:
    """The keys of an object for an error message."""
    return ", ".join(f"`{key}`" for key in entry) or "no key"


def _is_encodable(entry: Any) -> bool:
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
