"""Text to token ids and back, through a Hugging Face tokenizer in a local folder.

Knows nothing of requests; a model's own end-of-text tokens are read from its generation config as well, since many name
more of them there than the tokenizer does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from eyas.deployments.api_error import ApiError


class Tokenizer:
    """Safe to call from several threads: nothing changes after construction."""

    def __init__(self, tokenizer: Any, extra_eos_token_ids: Sequence[int] = ()) -> None:
        """`tokenizer` is a `transformers` tokenizer."""
        self._tokenizer = tokenizer
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._eos_token_ids = frozenset(own).union(extra_eos_token_ids)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Read the tokenizer in `folder`; never reaches for the network, never runs code from the folder."""
        # Imported here because it pulls in torch, which the ingress itself does without.
        from transformers import AutoTokenizer

        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"no tokenizer folder {folder}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ValueError(f"model: no tokenizer can be read from {folder}: {first_line}") from error
        return cls(tokenizer, _generation_eos_token_ids(folder))

    @property
    def raw(self) -> Any:
        """The `transformers` tokenizer itself."""
        return self._tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a bare prompt, with the tokenizer's own begin-of-text token where it has one."""
        return [int(token_id) for token_id in self._tokenizer.encode(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, otherwise exactly as the tokens spell it."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the whole conversation up to where the assistant's answer begins.

        A conversation the model's template refuses (roles out of order, for instance) is an `ApiError`.
        """
        if self._tokenizer.chat_template is None:
            raise ApiError(
                400, "messages: this model has no chat template; use /v1/completions", "messages", "no_chat_template"
            )
        try:
            token_ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {error}", "messages", "chat_template_error"
            ) from error
        return [int(token_id) for token_id in token_ids]


def _generation_eos_token_ids(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.exists():
        return []
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if value is None:
        return []
    return [int(token_id) for token_id in (value if isinstance(value, list) else [value])]
