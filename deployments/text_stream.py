"""From the tokens of one request to the text its client may see: incremental decoding, stops and the token cap.

Tokens are examined one by one in order, so the result does not depend on how verify steps group them. Knows nothing of
HTTP, sampling or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eyas.deployments.engine_client import FinishReason, GenerationRequest

REPLACEMENT = "\ufffd"
# A character has at most four bytes and a token at least one, so after this many tokens of broken text only the very
# last replacement character can still become something else.
MAX_PENDING_TOKENS = 8
# Tokens of the prompt that decoding starts from: the first new token keeps its leading space, or completes a character.
NUM_CONTEXT_TOKENS = 8


class TokenDecoder(Protocol):
    """The part of a tokenizer this module reads."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """What one push added.

    Args:
        text: settled text, nothing of a stop string in it.
        token_ids: tokens that count, up to and including the one that ended the text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class TextStream:
    """The growing text of one request.

    Whatever comes first ends it: an end-of-text or stop token (left out of the text), the last character of a stop
    string (the text ends before its first), or `max_tokens`. A stop on the last allowed token is a stop. Of stop
    strings completed by the same character the longest counts. An unfinished character at the very end is left out.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        max_tokens: int,
        stop_strings: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids if ignore_eos else stop_token_ids | decoder.eos_token_ids
        self._detokenizer = _Detokenizer(decoder, prompt_ids)
        self._scanner = _StopScanner(stop_strings)
        self._num_tokens = 0
        self._finish_reason: FinishReason | None = None

    @classmethod
    def of_request(cls, decoder: TokenDecoder, request: GenerationRequest) -> TextStream:
        return cls(
            decoder,
            max_tokens=request.max_tokens,
            stop_strings=request.stop_strings,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            prompt_ids=request.prompt_ids,
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far, the one that ended the text included."""
        return self._num_tokens

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Take the tokens of one step; those after the end, in this push or a later one, are dropped."""
        pieces: list[str] = []
        num_kept = 0
        for token_id in token_ids:
            if self._finish_reason is not None:
                break
            num_kept += 1
            pieces.append(self._take(token_id))
        return Delta("".join(pieces), tuple(token_ids[:num_kept]), self._finish_reason)

    def _take(self, token_id: int) -> str:
        self._num_tokens += 1
        if token_id in self._stop_token_ids:
            self._finish_reason = "stop"
            return self._scanner.drain()
        text, is_stopped = self._scanner.feed(self._detokenizer.feed(token_id))
        if is_stopped:
            self._finish_reason = "stop"
        elif self._num_tokens == self._max_tokens:
            self._finish_reason = "length"
            text += self._scanner.drain()
        return text


class _Detokenizer:
    """Decodes a short window of the newest tokens and hands out what the newest one added.

    The window starts with the tokens of the last whole piece of text, because a token's text may depend on its
    predecessor (a leading space, a shared character); the cost of a token does not depend on the length of the text.
    """

    def __init__(self, decoder: TokenDecoder, prompt_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._window = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        self._num_settled = len(self._decode().rstrip(REPLACEMENT))
        self._num_pending = 0

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode()
        is_whole = not text.endswith(REPLACEMENT)
        is_overdue = self._num_pending > MAX_PENDING_TOKENS
        num_stable = len(text)
        if not is_whole:
            # Some decoders replace every byte of an unfinished run, those of its whole characters included.
            num_stable = len(text) - 1 if is_overdue else len(text.rstrip(REPLACEMENT))
        piece = text[self._num_settled : num_stable]
        self._num_settled = max(self._num_settled, num_stable)
        if is_overdue and not piece:
            # A long run of tokens without text, such as ignored end-of-text tokens: no use as context for the next one.
            self._window.pop()
            self._num_pending -= 1
        elif is_overdue or (is_whole and piece):
            del self._window[: -self._num_pending]
            self._num_settled = max(0, len(self._decode()) - (len(text) - num_stable))
            self._num_pending = 0
        return piece

    def _decode(self) -> str:
        return self._decoder.decode(self._window) if self._window else ""


class _StopScanner:
    """Finds the first completed stop string in a text that arrives in pieces (Knuth-Morris-Pratt, a state per string).

    A state is the length of the longest suffix of the text that begins that stop string; text within the longest of
    them is held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if "" in stop_strings:
            raise ValueError("a stop string must not be empty")
        self._stops = [(stop, _borders(stop)) for stop in stop_strings]
        self._states = [0] * len(stop_strings)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was completed (what follows it is dropped)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            longest_match = self._advance(text[end - 1])
            if longest_match:
                self._held = ""
                return text[: end - longest_match], True
        num_shown = len(text) - max(self._states)
        self._held = text[num_shown:]
        return text[:num_shown], False

    def drain(self) -> str:
        """The text held back, now that nothing will follow."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that `character` completes, 0 if none."""
        longest_match = 0
        for index, (stop, borders) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            self._states[index] = state
            if state == len(stop):
                longest_match = max(longest_match, state)
        return longest_match


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        length += pattern[index] == pattern[length]
        borders[index] = length
    return borders
