"""Request bodies: what is taken, with which defaults, and how each refusal names its field."""

from __future__ import annotations

import json

import pytest

from eyas.deployments.api_error import ApiError
from eyas.deployments.protocol import ChatCompletionRequest, CompletionRequest, parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def parse(fields, content_type="application/json"):
    body_type = CompletionRequest if "prompt" in fields else ChatCompletionRequest
    return parse_body(body_type, json.dumps(fields).encode(), content_type)


def refusal(fields, **settings):
    with pytest.raises(ApiError) as caught:
        parse(fields, **settings)
    return caught.value


@pytest.mark.parametrize("base", [CHAT, TEXT])
def test_defaults_are_those_of_openai(base):
    """Catches greedy or cut-off answers for clients that rely on OpenAI's defaults."""
    body = parse(base)
    sampling = body.sampling_params()
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    assert body.token_limit is None
    assert body.stop == []
    assert not body.stream
    assert not body.includes_usage


@pytest.mark.parametrize("base", [CHAT, TEXT])
def test_null_means_the_default(base):
    """Catches refusing clients that send every optional field as null."""
    nullable = set(type(parse(base)).model_fields) - {"model", "messages", "prompt"}
    assert len(nullable) > 15
    body = parse({**base, **dict.fromkeys(nullable)})
    assert body.sampling_params().temperature == 1.0
    assert body.stop == []


def test_missing_seed_is_drawn_afresh_and_fits_a_double():
    """Catches sampled requests that all share one seed, and seeds that JavaScript clients cannot read back."""
    body = parse(CHAT)
    seeds = {body.sampling_params().seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) < 1 << 53


def test_seed_is_kept_and_greedy_needs_none():
    """Catches replacing a given seed, zero included, and a random seed reported for a greedy answer."""
    assert parse({**CHAT, "seed": 0}).sampling_params().seed == 0
    assert parse({**CHAT, "seed": 7, "temperature": 0}).sampling_params().seed == 7
    assert parse({**CHAT, "temperature": 0}).sampling_params().seed == 0


def test_content_may_be_text_parts():
    """Catches refusing the list form of `content` that several SDKs always send."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse({**CHAT, "messages": [{"role": "developer", "content": parts, "name": "ops"}]})
    assert body.messages[0].for_template() == {"role": "system", "content": "a\nb", "name": "ops"}


def test_an_earlier_answer_can_be_sent_back_as_it_came():
    """Catches refusing the message object that the OpenAI client hands to its caller."""
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    body = parse({**CHAT, "messages": [*CHAT["messages"], answer, *CHAT["messages"]]})
    assert body.messages[1].for_template() == {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(("prompt", "expected"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_prompt_forms(prompt, expected):
    """Catches refusing a form of `prompt` that means one prompt."""
    assert parse({**TEXT, "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(("stop", "expected"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], []), (None, [])])
def test_stop_forms(stop, expected):
    """Catches taking the characters of a single stop string for stop strings."""
    assert parse({**TEXT, "stop": stop}).stop == expected


def test_newer_name_of_the_token_limit():
    """Catches dropping `max_completion_tokens`, and errors that name the field the client did not send."""
    body = parse({**CHAT, "max_completion_tokens": 5, "max_tokens": 5})
    assert (body.token_limit, body.token_limit_field) == (5, "max_completion_tokens")
    assert parse({**CHAT, "max_tokens": 5}).token_limit_field == "max_tokens"
    assert refusal({**CHAT, "max_completion_tokens": 5, "max_tokens": 6}).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (CHAT, "n", 1),
        (CHAT, "presence_penalty", 0),
        (CHAT, "frequency_penalty", 0.0),
        (CHAT, "logit_bias", {}),
        (CHAT, "logprobs", False),
        (CHAT, "tools", []),
        (CHAT, "tool_choice", "none"),
        (CHAT, "response_format", {"type": "text"}),
        (CHAT, "modalities", ["text"]),
        (CHAT, "store", False),
        (CHAT, "service_tier", "auto"),
        (CHAT, "user", "someone"),
        (CHAT, "prompt_cache_key", "k"),
        (TEXT, "best_of", 1),
        (TEXT, "echo", False),
        (TEXT, "suffix", ""),
    ],
)
def test_fields_that_ask_for_nothing_pass(base, field, value):
    """Catches refusing SDKs that spell out OpenAI's defaults."""
    parse({**base, field: value})


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (CHAT, "n", 2),
        (CHAT, "n", True),
        (CHAT, "n", 1.0),
        (CHAT, "presence_penalty", 0.5),
        (CHAT, "frequency_penalty", -1),
        (CHAT, "frequency_penalty", False),
        (CHAT, "logit_bias", {"5": 1}),
        (CHAT, "logprobs", True),
        (CHAT, "top_logprobs", 2),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "functions", [{}]),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "store", True),
        (TEXT, "logprobs", 0),
        (TEXT, "best_of", 2),
        (TEXT, "echo", True),
        (TEXT, "suffix", "end"),
    ],
)
def test_unsupported_fields_are_refused_with_a_remedy(base, field, value):
    """Catches silently ignoring a field whose effect the client counts on."""
    error = refusal({**base, field: value})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert error.message.startswith(f"{field}: is not supported: ")
    assert len(error.message) > len(f"{field}: is not supported: ") + 10


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({**CHAT, "temperature": "hot"}, "temperature", "must be a finite number, not the string 'hot'"),
        ({**CHAT, "temperature": True}, "temperature", "must be a finite number, not true"),
        ({**CHAT, "temperature": float("nan")}, "temperature", "must be a finite number, not nan"),
        ({**CHAT, "temperature": float("inf")}, "temperature", "must be a finite number"),
        ({**CHAT, "temperature": 10**400}, "temperature", "not a number that large"),
        ({**CHAT, "temperature": -1}, "temperature", "must be at least 0"),
        ({**CHAT, "temperature": 2.5}, "temperature", "must be at most 2"),
        ({**CHAT, "top_p": 0}, "top_p", "must be above 0"),
        ({**CHAT, "top_p": 1.5}, "top_p", "must be at most 1"),
        ({**CHAT, "seed": 1.5}, "seed", "must be an integer, not 1.5"),
        ({**CHAT, "seed": -1}, "seed", "must be at least 0"),
        ({**CHAT, "seed": 1 << 63}, "seed", "must be below 9223372036854775808"),
        ({**CHAT, "max_tokens": "5"}, "max_tokens", "must be an integer, not the string '5'"),
        ({**CHAT, "max_tokens": False}, "max_tokens", "must be an integer, not false"),
        ({**CHAT, "stream": "yes"}, "stream", "must be true or false, not the string 'yes'"),
        ({**CHAT, "stream": 1}, "stream", "must be true or false, not 1"),
        ({**CHAT, "stream": True, "stream_options": True}, "stream_options", "must be a JSON object, not true"),
        ({**CHAT, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not a field"),
        ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options", "stream set to true"),
        ({**CHAT, "stop": list("abcde")}, "stop", "must have at most 4 entries, got 5"),
        ({**CHAT, "stop": [""]}, "stop[0]", "must not be empty"),
        ({**CHAT, "stop": ["a", 5]}, "stop[1]", "must be a string, not 5"),
        ({**CHAT, "stop": 5}, "stop", "must be a string or a list of strings, not 5"),
        ({**CHAT, "stop": "x" * 2000}, "stop[0]", "must have at most 1024 characters"),
        ({**CHAT, "stop_token_ids": [1, "2"]}, "stop_token_ids[1]", "must be an integer"),
        ({**CHAT, "stop_token_ids": [-1]}, "stop_token_ids[0]", "must be at least 0"),
        ({**CHAT, "max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({**CHAT, "top_k": 5}, "top_k", "is not a field Eyas knows"),
        ({"messages": CHAT["messages"]}, "model", "is required"),
        ({"model": "m"}, "messages", "is required"),
        ({**CHAT, "messages": "hi"}, "messages", "must be a list, not the string 'hi'"),
        ({**CHAT, "messages": [{"content": "hi"}]}, "messages[0].role", "is required"),
        ({**CHAT, "messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({**CHAT, "messages": ["hi"]}, "messages[0]", "must be a JSON object"),
        ({**CHAT, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant', not the string"),
        ({**CHAT, "messages": [{"role": "user", "content": None}]}, "messages[0].content", "not null"),
        ({**CHAT, "messages": [{"role": "user", "content": []}]}, "messages[0].content", "not an empty list"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "this model reads nothing else",
        ),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]}]},
            "messages[0].content",
            "does not know: bold",
        ),
        (
            {**CHAT, "messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "is not supported",
        ),
        ({**TEXT, "prompt": ["a", "b"]}, "prompt", "exactly one prompt, got 2"),
        ({**TEXT, "prompt": [[1], [2]]}, "prompt", "exactly one prompt, got 2"),
        ({**TEXT, "prompt": [1, True]}, "prompt", "list of token ids"),
        ({**TEXT, "prompt": [1.0]}, "prompt", "list of token ids"),
        ({**TEXT, "prompt": [-1]}, "prompt", "list of token ids"),
        ({**TEXT, "prompt": {"text": "a"}}, "prompt", "list of token ids"),
        ({**TEXT, "prompt": None}, "prompt", "list of token ids"),
        ({**TEXT, "prompt": [""]}, "prompt", "must not be empty"),
        ({**TEXT, "prompt": [[]]}, "prompt", "must not be empty"),
    ],
)
def test_bad_values_are_refused_in_plain_words(fields, param, words):
    """Catches coercion of the wrong type, a missed bound, and messages that do not say which field or what is wrong."""
    error = refusal(fields)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")
    assert words in error.message


def test_all_problems_are_reported_at_once():
    """Catches making a client fix its request one field at a time."""
    error = refusal({**CHAT, "temperature": -1, "top_p": 0})
    assert error.param == "temperature"
    assert "top_p: must be above 0" in error.message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not valid JSON"),
        (b'{"model": ', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b'{"model": "\\ud800"}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"seed": ' + b"9" * 100_000 + b"}", "is not valid JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'"text"', "must be a JSON object, not the string 'text'"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw, words):
    """Catches a parser error (bad UTF-8, deep nesting, endless numbers) that escapes as a server error."""
    with pytest.raises(ApiError, match="body: ") as caught:
        parse_body(ChatCompletionRequest, raw, "application/json")
    assert caught.value.status == 400
    assert caught.value.param == "body"
    assert words in caught.value.message


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_refused(content_type):
    """Catches reading forms, which browsers send to other sites without asking, as JSON."""
    error = refusal(CHAT, content_type=content_type)
    assert (error.status, error.param) == (415, "content-type")


def test_content_type_parameters_and_case_do_not_matter():
    """Catches refusing clients that add a charset."""
    parse(CHAT, content_type="Application/JSON; charset=utf-8")
