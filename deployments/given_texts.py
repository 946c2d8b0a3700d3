"""Texts a user gave with `--corpus`: read, checked, tokenised, and written as a corpus into the work folder."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eyas.deployments.corpus_size import announce_size
from eyas.deployments.progress import progress_bar
from eyas.deployments.tokenizer import Tokenizer
from eyas.models.config import DecoderConfig
from eyas.training.chat_texts import read_conversations, tokenise_conversation
from eyas.training.dataset import ComputeStates
from eyas.training.shard import shard_files
from eyas.training.states import recorded_layers
from eyas.training.text_corpus import Manifest, bytes_per_token, shard_file, shards_of, write_texts
from eyas.training.text_files import read_bytes, read_text
from eyas.training.texts import Text, cut_texts, encode_in_pieces, windows

_OPTION = "--corpus"
_NUM_BYTES = 256
_SUFFIXES = (".jsonl", ".json", ".txt")


@dataclass(frozen=True)
class GivenTexts:
    """Texts ready to be trained on.

    Args:
        files: where they come from.
        options: what besides the files decides over the tokens.
        notes: lines to print.
    """

    texts: list[Text]
    files: list[Path]
    options: dict[str, object]
    notes: list[str]

    @property
    def num_tokens(self) -> int:
        return sum(text.token_ids.shape[0] for text in self.texts)

    @staticmethod
    def read(
        paths: Sequence[Path], tokenizer: Tokenizer | None, target: DecoderConfig, max_length: int, window: int
    ) -> GivenTexts:
        """Read chat and plain text files.

        Args:
            tokenizer: None takes plain text as UTF-8 bytes.

        Raises:
            ValueError: naming option, file, line and remedy.
        """
        if tokenizer is None and target.vocab_size < _NUM_BYTES:
            raise ValueError(
                f"--text-encoding: bytes needs the ids 0 to 255, the target has {target.vocab_size}; use tokens"
            )
        texts: list[Text] = []
        files: list[Path] = []
        notes: list[str] = []
        for path in paths:
            plain = _plain_files(path)
            if plain:
                found = _plain_texts(plain, path, tokenizer, window)
            else:
                found, note = _chat_texts(path, tokenizer, target, max_length)
                notes += [] if note is None else [note]
            largest = max(int(text.token_ids.max()) for text in found)
            if largest >= target.vocab_size:
                raise ValueError(
                    f"--target: its tokenizer gives the id {largest} for {path}, but its vocabulary ends at "
                    f"{target.vocab_size - 1}; the tokenizer is another model's"
                )
            texts += found
            files += plain or [path]
        encoding = "bytes" if tokenizer is None else "tokens"
        options: dict[str, object] = {"max_length": max_length, "window": window, "text_encoding": encoding}
        return GivenTexts(texts, files, options, notes)


def record_texts(
    texts: GivenTexts,
    args: argparse.Namespace,
    target_folder: Path,
    target: DecoderConfig,
    console: Console,
    load_states: Callable[[], ComputeStates],
) -> Path:
    """Write the texts as shards into the work folder, with the target's states if they are to be recorded.

    The texts are shuffled, so that those kept for validation are like the others.

    Args:
        load_states: called if there are states to compute.

    Raises:
        ValueError: if the folder holds something else, or the disk has no room.
    """
    folder: Path = args.work_dir / "texts"
    is_recorded = args.states == "recorded"
    num_states = len(recorded_layers(target)) if is_recorded else 0
    token_bytes = bytes_per_token(num_states, target.hidden_size)
    ordered = list(texts.texts)
    random.Random(args.seed).shuffle(ordered)
    shards = shards_of(ordered, token_bytes)
    states = f"recorded in {args.dtype}" if is_recorded else args.states
    options = texts.options | {"target": str(target_folder), "states": states, "seed": args.seed}
    manifest = Manifest.of(texts.files, options)
    missing = [group for index, group in enumerate(shards) if not shard_file(folder, index).exists()]
    num_missing = sum(text.token_ids.shape[0] for group in missing for text in group)
    manifest.check(folder)
    announce_size(console, folder, texts.num_tokens, token_bytes, num_missing, "--corpus")
    manifest.claim(folder)
    if not missing:
        return folder
    compute_states = load_states() if is_recorded else None
    label = "recording the target's states" if is_recorded else "writing the texts"
    with progress_bar() as progress:
        task = progress.add_task(label, total=texts.num_tokens, note="tokens")
        write_texts(folder, shards, compute_states, lambda num_tokens: progress.advance(task, num_tokens))
    return folder


def _plain_files(path: Path) -> list[Path]:
    """The .txt files a path stands for; none for a file of chats."""
    if path.is_dir():
        found = sorted(path.glob("*.txt"))
        if not found:
            inside = [name for name in ("corpus", "texts") if shard_files(path / name)]
            remedy = f"give {path / inside[0]}" if inside else "name a file or another folder"
            raise ValueError(
                f"{_OPTION}: {path} holds no shard of a corpus and no .txt file; {remedy}, or leave {_OPTION} out to "
                "let the target write a corpus"
            )
        others = sorted(path.glob("*.jsonl"))
        if others:
            raise ValueError(
                f"{_OPTION}: {path} holds {others[0].name} beside its .txt files, only these would be read; name the "
                f"files one by one, each with a {_OPTION} of its own, or move the others elsewhere"
            )
        return found
    if path.exists() and path.suffix not in _SUFFIXES:
        raise ValueError(
            f"{_OPTION}: {path}: its name does not say what it holds; let it end in .jsonl for chats or in .txt for "
            "plain text"
        )
    return [path] if path.suffix == ".txt" else []


def _plain_texts(files: Sequence[Path], path: Path, tokenizer: Tokenizer | None, window: int) -> list[Text]:
    found = [piece for file in files for piece in _windows_of(file, tokenizer, window)]
    if len(found) < 2:
        raise ValueError(
            f"{_OPTION}: {path} holds {len(found)} window{'' if len(found) == 1 else 's'} of up to {window} tokens "
            "(--window), at least 2 are needed, one of them for validation; add text or lower --window"
        )
    return found


def _windows_of(file: Path, tokenizer: Tokenizer | None, window: int) -> list[Text]:
    if tokenizer is None:
        return windows(read_bytes(file, _OPTION), window)
    raw = tokenizer.raw
    begins = raw.encode("")[:1]
    first_id = begins[0] if begins and begins[0] == raw.bos_token_id else None

    def encode(text: str) -> list[int]:
        token_ids: list[int] = raw(text, add_special_tokens=False, verbose=False)["input_ids"]
        return token_ids

    return windows(encode_in_pieces(read_text(file, _OPTION), encode), window, first_id)


def _chat_texts(
    file: Path, tokenizer: Tokenizer | None, target: DecoderConfig, max_length: int
) -> tuple[list[Text], str | None]:
    if tokenizer is None:
        raise ValueError(f"--text-encoding: bytes is for plain text, but {file} holds chats; use tokens")
    if not tokenizer.has_chat_template:
        raise ValueError(f"{_OPTION}: {file} holds chats, but the target has no chat template; give a .txt file")
    found = []
    with progress_bar() as progress:
        task = progress.add_task(f"reading {file.name}", total=None, note="conversations")
        for place, messages in read_conversations(file, _OPTION):
            found.append(tokenise_conversation(messages, tokenizer.raw, tokenizer.eos_token_ids, place))
            progress.advance(task)
    limit = f"the target's context is {target.max_positions}"
    return cut_texts(found, max_length, f"{_OPTION}: {file}", limit)
