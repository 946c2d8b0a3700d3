"""A corpus writer in this process, on a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from eyas.deployments.corpus_writers import CorpusJob, write_own_corpus
from eyas.models.target_loading import load_target_decoder
from eyas.training.corpus import Writer
from eyas.training.generation import CorpusConfig
from eyas.training.openers import OPENERS
from eyas.training.shard import Shard, read_shard, shard_files
from eyas.training.states import TargetStates, recorded_layers

if TYPE_CHECKING:
    from tests.conftest import TinyModels

END = 258
CONFIG = CorpusConfig(num_tokens=10, conversations_per_shard=4, max_user_tokens=6, max_answer_tokens=8)
PROMPTS = [[5, 6, 7], [9], list(range(40)), [5, 6, 8]]


@pytest.fixture(scope="module")
def target(tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None]) -> Path:
    folder = tiny_models.target(num_hidden_layers=6, vocab_size=264)
    save_chat_tokenizer(folder)
    return folder


def written(target: Path, folder: Path, prompts: list[list[int]] | None, records_states: bool = True) -> Shard:
    write_own_corpus(CorpusJob(target, folder, CONFIG, "float32", Writer(), prompts, records_states))
    return read_shard(shard_files(folder)[0])


def texts_of(shard: Shard) -> list[list[int]]:
    return [piece.tolist() for piece in shard.token_ids.split(shard.lengths)]


def test_given_prompts_are_answered(target: Path, tmp_path: Path) -> None:
    """Catches prompts that are changed on the way, and recorded states that are not those computed of the text."""
    shard = written(target, tmp_path, PROMPTS)
    prompts = [text[:length] for text, length in zip(texts_of(shard), shard.prompt_lengths(), strict=True)]
    assert sorted(prompts) == sorted(PROMPTS)
    assert shard.features is not None
    model = load_target_decoder(target, torch.float32, torch.device("cpu"))
    computed = TargetStates(model, recorded_layers(model.config))(shard.token_ids, shard.lengths)
    torch.testing.assert_close(computed, shard.features.float(), rtol=2**-8, atol=1e-3)


def test_the_same_texts_without_states(target: Path, tmp_path: Path) -> None:
    """Catches texts that depend on whether states are recorded; a recorder alone misses an answer's last token."""
    with_states = texts_of(written(target, tmp_path / "a", PROMPTS))
    shard = written(target, tmp_path / "b", PROMPTS, records_states=False)
    assert shard.features is None
    assert [text[:-1] for text in texts_of(shard)] == with_states


def test_invented_turns_stand_in_the_chat_template(target: Path, tmp_path: Path) -> None:
    """Catches a user turn without what the template puts around it."""
    from transformers import AutoTokenizer

    shard = written(target, tmp_path, None)
    tokenizer = AutoTokenizer.from_pretrained(target)
    around = tokenizer.apply_chat_template(
        [{"role": "user", "content": "@"}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tokenizer.encode(piece, add_special_tokens=False) for piece in around.split("@"))
    longest = max(len(tokenizer.encode(opener, add_special_tokens=False)) for opener in OPENERS)
    for text, length in zip(texts_of(shard), shard.prompt_lengths(), strict=True):
        assert text[: len(before)] == before
        assert text[length - len(after) : length] == after
        assert len(before) + len(after) < length <= len(before) + len(after) + longest + CONFIG.max_user_tokens
