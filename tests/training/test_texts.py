from __future__ import annotations

import re

import pytest
import torch

from eyas.training import texts
from eyas.training.texts import Text, cut_texts, encode_in_pieces, warning_if_few, windows


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


def cut(number: int, size: int, first_id: int | None = None) -> list[list[int]]:
    return [text.token_ids.tolist() for text in windows(range(10, 10 + number), size, first_id)]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, []),
        (1, []),
        (2, [[10, 11]]),
        (4, [[10, 11, 12, 13]]),
        (5, [[10, 11, 12, 13]]),
        (6, [[10, 11, 12, 13], [14, 15]]),
        (8, [[10, 11, 12, 13], [14, 15, 16, 17]]),
    ],
)
def test_windows_at_their_boundary(number: int, expected: list[list[int]]) -> None:
    """Catches a window lost at the end of a text, one token too many, and a window with nothing to foretell."""
    assert cut(number, 4) == expected


def test_a_first_token_counts_in_every_window() -> None:
    """Catches windows that lack the token every text begins with, or exceed the size because of it."""
    assert cut(6, 4, first_id=1) == [[1, 10, 11, 12], [1, 13, 14, 15]]
    assert cut(1, 4, first_id=1) == [[1, 10]]


def test_all_of_a_window_but_its_first_token_is_foretold() -> None:
    """Catches a loss on the first token, before which there is nothing."""
    assert [text.is_answer.tolist() for text in windows(range(5), 3)] == [[False, True, True], [False, True]]


def text_of(prompt: int, answer: int) -> Text:
    return Text(torch.arange(prompt + answer), torch.arange(prompt + answer) >= prompt)


def test_long_conversations_are_cut_and_counted() -> None:
    """Catches conversations above the context, ones without an answer that stay, and a cut nobody is told of."""
    given = [text_of(2, 2), text_of(2, 9), text_of(6, 1), text_of(1, 3)]
    kept, note = cut_texts(given, 4, "--corpus: x", "no limit")
    assert [text.token_ids.shape[0] for text in kept] == [4, 4, 4]
    assert note == (
        "--corpus: x: 2 of 4 conversations are longer than 4 tokens (--max-length) and were cut; 1 had no answer left "
        "and were left out"
    )
    assert cut_texts(given[1:], 20, "--corpus: x", "no limit")[1] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [text_of(3, 3), text_of(3, 2)],
            "--corpus: x: all 2 conversations are longer than 4 tokens, the shortest has 5; raise --max-length (up to "
            "9) or give shorter conversations",
        ),
        (
            [text_of(2, 2)],
            "--corpus: x: holds 1 conversation to train on, at least 2 are needed, one of them for validation; add "
            "texts",
        ),
        (
            [text_of(2, 2), text_of(2, 1), text_of(2, 9)],
            "--corpus: x: all 3 conversations begin with the same prompt, at least 2 are needed, one of them for "
            "validation; add others",
        ),
        (
            [text_of(2, 2), text_of(5, 2)],
            "--corpus: x: holds 1 conversation to train on, at least 2 are needed, one of them for validation; add "
            "texts",
        ),
    ],
)
def test_too_few_or_too_long_conversations(given: list[Text], message: str) -> None:
    """Catches a run that fails after the target was run over all texts."""
    with pytest.raises(ValueError, match=exactly(message)):
        cut_texts(given, 4, "--corpus: x", "up to 9")


def test_a_long_text_is_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches characters lost or doubled between pieces, and a line longer than a piece that never ends."""
    monkeypatch.setattr(texts, "_CHUNK_CHARACTERS", 8)
    text = "one\ntwo\na line of many characters\n\nend"
    pieces: list[str] = []

    def encode(piece: str) -> list[int]:
        pieces.append(piece)
        return [ord(character) for character in piece]

    assert encode_in_pieces(text, encode) == [ord(character) for character in text]
    assert pieces[0] == "one\ntwo\n"
    assert max(map(len, pieces)) <= 8


def test_few_texts_are_warned_of() -> None:
    """Catches a warning that never comes, or one on every corpus."""
    assert warning_if_few(500, 100, "--corpus") is None
    assert warning_if_few(499, 100, "--corpus") == (
        "warning: --corpus: 499 tokens are fewer than 5 batches of 100 (--batch-tokens); the head will learn them by "
        "heart: give more texts"
    )
