"""The Hugging Face tokenizer behind the ingress, on a small byte-level one made here."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from eyas.deployments.api_error import ApiError
from eyas.deployments.text_stream import TextStream
from eyas.deployments.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    rust.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    path = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<|bos|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [259]}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


def test_ids_and_text(tokenizer):
    """Catches a lost begin-of-text token, numpy or tensor ids, special tokens shown, and cleaned-up spaces."""
    text = "Hi , é🦅 !"
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == 256
    assert all(type(token_id) is int for token_id in token_ids)
    assert tokenizer.decode([*token_ids, 258]) == text
    assert tokenizer.vocab_size == 260


def test_end_of_text_tokens_come_from_both_files(tokenizer):
    """Catches chat models that end their turn with a token only the generation config names."""
    assert tokenizer.eos_token_ids == {258, 259}


def test_chat_template(tokenizer):
    """Catches a dict in place of ids (transformers 5's default), no prompt for the answer, a doubled begin token."""
    token_ids = tokenizer.apply_chat_template([{"role": "user", "content": "é"}])
    assert all(type(token_id) is int for token_id in token_ids)
    assert token_ids[0] == 257
    assert tokenizer.decode(token_ids) == "user\né\nassistant\n"
    assert 256 not in token_ids


def test_template_refusals_name_messages(tokenizer):
    """Catches a template's own exception ending as a server error."""
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(ApiError, match="system must come first") as caught:
        tokenizer.apply_chat_template(messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_model_without_template(tokenizer):
    """Catches a server error for base models, and an error without the way out."""

    class Bare:
        eos_token_id = None
        chat_template = None

    bare = Tokenizer(Bare())
    assert bare.eos_token_ids == frozenset()
    with pytest.raises(ApiError, match="/v1/completions"):
        bare.apply_chat_template([{"role": "user", "content": "a"}])


def test_folder_without_generation_config(folder, tmp_path):
    """Catches requiring a file that many folders lack."""
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {258}


def test_missing_folder_is_not_looked_up_elsewhere(tmp_path):
    """Catches a mistyped path taken for the name of a repository to download."""
    with pytest.raises(FileNotFoundError, match="no tokenizer folder"):
        Tokenizer.from_folder(tmp_path / "absent")


def test_streamed_text_is_the_decoded_text(tokenizer):
    """Catches a real decoder that behaves unlike the byte tokenizer of the other tests."""
    text = "naïve 漢字 🦅🦅 end"
    token_ids = tokenizer.encode(text)[1:]
    stream = TextStream(tokenizer, max_tokens=1000, prompt_ids=tokenizer.encode("before "))
    pieces = [stream.push([token_id]).text for token_id in [*token_ids, 258]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish_reason == "stop"
