"""Tokens to visible text: decoding, stop strings, stop tokens and the cap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.deployments.engine_client import GenerationRequest
from eyas.deployments.text_stream import TextStream
from eyas.workers.sampling import SamplingParams

EOS = 256


class ByteFallbackDecoder:
    """SentencePiece-like: an undecodable run of byte tokens becomes one replacement character per byte, and the first
    token of what is decoded loses its leading space. Tokens from 1000 on are the words " w0", " w1", ..."""

    eos_token_ids = frozenset({EOS})

    def decode(self, token_ids):
        text, run = "", b""
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id < 256:
                run += bytes([token_id])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            if token_id is not None and token_id >= 1000:
                text += f" w{token_id - 1000}"
        return text.removeprefix(" ")


class CountingDecoder:
    """Counts the tokens it is asked to decode."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.eos_token_ids = decoder.eos_token_ids
        self.num_decoded = 0

    def decode(self, token_ids):
        self.num_decoded += len(token_ids)
        return self.decoder.decode(token_ids)


def run(decoder, pushes, max_tokens=1000, **settings):
    """Text, kept tokens and finish reason of a whole token sequence given as pushes."""
    stream = TextStream(decoder, max_tokens=max_tokens, **settings)
    deltas = [stream.push(push) for push in pushes]
    kept = [token_id for delta in deltas for token_id in delta.token_ids]
    assert stream.num_tokens == len(kept)
    assert stream.finish_reason == deltas[-1].finish_reason
    return "".join(delta.text for delta in deltas), kept, stream.finish_reason


def one_by_one(text):
    return [[byte] for byte in text.encode()]


def test_characters_split_over_tokens_and_pushes_come_out_whole(byte_tokenizer):
    """Catches sending a replacement character for the first bytes of a character whose rest is still to come."""
    text = "aé漢🦅b"
    stream = TextStream(byte_tokenizer, max_tokens=100)
    pieces = [stream.push(push).text for push in one_by_one(text)]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_text_before_an_unfinished_character_is_not_held_up(byte_tokenizer):
    """Catches waiting for the whole token group although everything before the unfinished character is settled."""
    stream = TextStream(byte_tokenizer, max_tokens=100)
    assert stream.push(list(b"ok \xf0\x9f")).text == "ok "


def test_unfinished_character_at_the_cap_is_left_out(byte_tokenizer):
    """Catches flushing the bytes of half a character when max_tokens cuts it."""
    assert run(byte_tokenizer, one_by_one("a🦅"), max_tokens=3) == ("a", list("a🦅".encode()[:3]), "length")


def test_genuine_replacement_characters_are_text(byte_tokenizer):
    """Catches dropping or doubling U+FFFD when the model really wrote it."""
    text = "a\ufffdb\ufffd\ufffdc"
    assert run(byte_tokenizer, one_by_one(text))[0] == text


def test_endless_broken_bytes_keep_flowing_at_constant_cost(byte_tokenizer):
    """Catches holding back (and re-decoding) an ever longer tail while the model writes invalid UTF-8."""
    decoder = CountingDecoder(byte_tokenizer)
    tokens = [0xFF] * 2000 + list(b"ok")
    text, _, _ = run(decoder, [tokens], max_tokens=5000)
    assert text == "\ufffd" * 2000 + "ok"
    assert decoder.num_decoded < 40 * len(tokens)


@pytest.mark.parametrize("token_id", [ord("a"), EOS], ids=["text", "ignored end-of-text tokens"])
def test_cost_per_token_does_not_grow_with_the_text(byte_tokenizer, token_id):
    """Catches decoding all tokens so far on each push, and a window that grows while tokens add no text."""
    decoder = CountingDecoder(byte_tokenizer)
    run(decoder, [[ord("x")], *([token_id] for _ in range(3000))], max_tokens=5000, ignore_eos=True)
    assert decoder.num_decoded < 40 * 3000


def test_byte_fallback_characters_are_not_repeated_or_broken():
    """Catches trusting that text only grows: such decoders redraw a whole byte run while its end is unfinished."""
    text = "é漢🦅é"
    decoder = ByteFallbackDecoder()
    assert run(decoder, [[1001], *one_by_one(text), [1002]])[0] == f"w1{text} w2"


def test_words_after_textless_tokens_keep_their_space():
    """Catches losing the context of the next word when a token without text comes between."""
    decoder = ByteFallbackDecoder()
    pushes = [[1001], [EOS], [1002], *([EOS] for _ in range(20)), [1003]]
    assert run(decoder, pushes, ignore_eos=True)[0] == "w1 w2 w3"


def test_prompt_gives_the_first_token_its_leading_space():
    """Catches gluing a completion's first word to the prompt's last one."""
    decoder = ByteFallbackDecoder()
    assert run(decoder, [[1001]], prompt_ids=[1000])[0] == " w1"
    assert run(decoder, [[1001]])[0] == "w1"


def test_prompt_ending_inside_a_character_is_completed(byte_tokenizer):
    """Catches swallowing a character whose first bytes belong to the prompt."""
    first, *rest = "é!".encode()
    assert run(byte_tokenizer, [rest], prompt_ids=[first])[0] == "é!"


def test_stop_token_ends_text_and_is_not_in_it(byte_tokenizer):
    """Catches showing the stop token's text, or leaking tokens accepted after it in the same run."""
    stops = frozenset({ord("!")})
    assert run(byte_tokenizer, [list(b"ab!cd")], stop_token_ids=stops) == ("ab", list(b"ab!"), "stop")


def test_end_of_text_token_stops_unless_ignored(byte_tokenizer):
    """Catches ignoring the tokenizer's own end, and ignore_eos switching off the request's own stop tokens."""
    tokens = [*b"ab", EOS, *b"c!d"]
    stops = frozenset({ord("!")})
    assert run(byte_tokenizer, [tokens], stop_token_ids=stops) == ("ab", [*b"ab", EOS], "stop")
    ignoring = run(byte_tokenizer, [tokens], stop_token_ids=stops, ignore_eos=True)
    assert ignoring == ("abc", [*b"ab", EOS, *b"c!"], "stop")


def test_stop_string_across_tokens_and_pushes(byte_tokenizer):
    """Catches matching within one piece only, and showing a beginning that turned out to be a stop."""
    stream = TextStream(byte_tokenizer, max_tokens=100, stop_strings=["</end>"])
    deltas = [stream.push(list(push)) for push in (b"text</", b"en", b"d>more")]
    assert [delta.text for delta in deltas] == ["text", "", ""]
    assert deltas[-1].token_ids == tuple(b"d>")
    assert deltas[-1].finish_reason == "stop"


def test_possible_stop_is_shown_once_it_is_none(byte_tokenizer):
    """Catches losing held-back text when the match fails, also when the failed match holds a new beginning."""
    stream = TextStream(byte_tokenizer, max_tokens=100, stop_strings=["aab"])
    assert [stream.push([byte]).text for byte in b"aaac"] == ["", "", "a", "aac"]


def test_possible_stop_is_shown_when_the_text_ends_otherwise(byte_tokenizer):
    """Catches dropping held-back text at the cap or at a stop token."""
    assert run(byte_tokenizer, [list(b"ab<")], max_tokens=3, stop_strings=["<end>"])[0] == "ab<"
    assert run(byte_tokenizer, [[*b"ab<", EOS]], stop_strings=["<end>"])[0] == "ab<"


def test_stop_completed_inside_an_accepted_run_beats_the_cap_later_in_it(byte_tokenizer):
    """Catches applying the cap to a whole push before looking for stops, or the reverse."""
    tokens = list(b"one.two")
    assert run(byte_tokenizer, [tokens], max_tokens=6, stop_strings=["."]) == ("one", tokens[:4], "stop")
    assert run(byte_tokenizer, [tokens], max_tokens=3, stop_strings=["."]) == ("one", tokens[:3], "length")


@pytest.mark.parametrize("settings", [{"stop_strings": ["."]}, {"stop_token_ids": frozenset(b".")}])
def test_stop_on_the_last_allowed_token_is_a_stop(byte_tokenizer, settings):
    """Catches reporting `length` for a text that ended by itself just in time."""
    assert run(byte_tokenizer, [list(b"one.")], max_tokens=4, **settings) == ("one", list(b"one."), "stop")


def test_first_completed_stop_wins_and_the_longest_of_equals(byte_tokenizer):
    """Catches choosing by the order in which the client listed its stops."""
    assert run(byte_tokenizer, [list(b"abcd")], stop_strings=["abcd", "bc"])[0] == "a"
    assert run(byte_tokenizer, [list(b"xabc")], stop_strings=["bc", "abc"])[0] == "x"


def test_pushes_after_the_end_are_dropped(byte_tokenizer):
    """Catches text of a step that was already under way when the request ended."""
    stream = TextStream(byte_tokenizer, max_tokens=1)
    stream.push([ord("a")])
    late = stream.push([ord("b")])
    assert (late.text, late.token_ids, late.finish_reason) == ("", (), "length")


def test_bad_settings_are_refused(byte_tokenizer):
    """Catches an empty stop string, which would match everywhere, and a cap that no token could reach."""
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(byte_tokenizer, max_tokens=1, stop_strings=[""])
    with pytest.raises(ValueError, match="max_tokens"):
        TextStream(byte_tokenizer, max_tokens=0)


def test_request_settings_all_reach_the_stream(byte_tokenizer):
    """Catches a field of the request that the stream is built without."""
    request = GenerationRequest(
        request_id="r",
        prompt_ids=list("é".encode())[:1],
        sampling=SamplingParams(),
        max_tokens=6,
        stop_strings=("yz",),
        stop_token_ids=frozenset(b"!"),
        ignore_eos=True,
    )
    for tail, expected in ((b"yz", "stop"), (b"!", "stop"), (b"abcd", "length")):
        stream = TextStream.of_request(byte_tokenizer, request)
        delta = stream.push([list("é".encode())[1], EOS, *tail])
        assert delta.text.startswith("é")
        assert delta.finish_reason == expected


tokens_strategy = st.one_of(
    st.lists(st.sampled_from([*b"aab.", *"é🦅".encode(), EOS]), max_size=40),
    st.lists(st.integers(0, 256), max_size=40),
    st.text(alphabet="ab.é漢🦅\ufffd", max_size=20).map(lambda text: list(text.encode())),
)
stops_strategy = st.lists(st.text(alphabet="ab.é🦅", min_size=1, max_size=4), max_size=4)


@settings(deadline=None, max_examples=400)
@given(tokens_strategy, stops_strategy, st.frozensets(st.integers(0, 256), max_size=2), st.integers(1, 50), st.data())
def test_result_does_not_depend_on_how_tokens_are_pushed(byte_tokenizer, tokens, stops, stop_ids, max_tokens, data):
    """Catches any rule applied per push instead of per token: text would change with the acceptance length."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    pushes = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    settings = {"max_tokens": max_tokens, "stop_strings": stops, "stop_token_ids": stop_ids}
    for decoder in (byte_tokenizer, ByteFallbackDecoder()):
        whole = run(decoder, [tokens], **settings)
        assert run(decoder, pushes, **settings) == whole
        assert run(decoder, [[token_id] for token_id in tokens] or [[]], **settings) == whole


@settings(deadline=None, max_examples=400)
@given(st.lists(st.integers(0, 256), max_size=60))
def test_text_is_what_the_tokenizer_decodes(byte_tokenizer, tokens):
    """Catches every loss, repetition or reordering in the window, for valid and invalid byte sequences alike."""
    text, kept, _ = run(byte_tokenizer, [tokens], ignore_eos=True)
    assert kept == tokens
    decoded = byte_tokenizer.decode(tokens)
    assert decoded.rstrip("\ufffd") == text.rstrip("\ufffd")
    assert decoded.startswith(text)


@settings(deadline=None, max_examples=400)
@given(st.text(alphabet="ab.é🦅", max_size=30), stops_strategy)
def test_stops_agree_with_a_search_character_by_character(byte_tokenizer, text, stops):
    """Catches errors of the automaton against the definition: the first character that completes any stop ends it."""
    expected, is_stopped = text, False
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            expected, is_stopped = text[: end - max(map(len, matches))], True
            break
    shown, _, finish_reason = run(byte_tokenizer, [[*text.encode(), EOS]], stop_strings=stops)
    assert shown == expected
    assert finish_reason == "stop"
    if is_stopped:
        assert EOS not in run(byte_tokenizer, [[*text.encode(), EOS]], stop_strings=stops)[1]
