"""From the options of `eyas train` to corpus folders, on a tiny target with a byte-level tokenizer."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from eyas.deployments import corpus_options, own_corpus
from eyas.deployments.corpus_options import (
    add_corpus_options,
    prepare_corpus,
    stop_token,
    target_states,
    text_length,
)
from eyas.deployments.corpus_writers import CorpusJob
from eyas.models.config import DecoderConfig
from eyas.training import text_corpus
from eyas.training.shard import Shard, read_shard, save_shard, shard_files

if TYPE_CHECKING:
    from tests.conftest import TinyModels

CONTEXT, VOCAB, HIDDEN, LAYERS = 64, 264, 32, 6
CHAT = {"messages": [{"role": "user", "content": "Ab?"}, {"role": "assistant", "content": "bbc"}]}
OTHER = {"messages": [{"role": "user", "content": "Cd?"}, {"role": "assistant", "content": "bbc"}]}
CHAT_TOKENS = 44  # of either, its end token included
LONG_CHAT = {"messages": [{"role": "user", "content": "Ab?" * 9}, {"role": "assistant", "content": "bbc"}]}


@pytest.fixture(scope="module")
def target(tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None]) -> Path:
    folder = tiny_models.target(num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    save_chat_tokenizer(folder)
    return folder


class Run:
    """Prepares a corpus for a target, and keeps what was printed."""

    def __init__(self, target: Path, work_folder: Path) -> None:
        self.target = target
        self.work_folder = work_folder
        self.printed = ""

    def __call__(self, *arguments: Any, **options: Any) -> list[Path]:
        args, printed = self.args(*arguments), io.StringIO()
        config = DecoderConfig.from_folder(self.target)
        try:
            return prepare_corpus(args, self.target, config, Console(file=printed, width=40), **options)
        finally:
            self.printed = printed.getvalue()

    def args(self, *arguments: Any) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        add_corpus_options(parser)
        parser.set_defaults(work_dir=self.work_folder, seed=0, dtype="float32", batch_tokens=10)
        return parser.parse_args([str(argument) for argument in arguments])

    def shards(self, *arguments: Any) -> list[Shard]:
        return [read_shard(file) for folder in self(*arguments) for file in shard_files(folder)]


@pytest.fixture
def run(target: Path, tmp_path: Path) -> Run:
    return Run(target, tmp_path / "work")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of JSON lines, or of text."""

    def write(name: str, *lines: Any) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return file

    return write


def test_chats_are_recorded_as_they_are_computed(run: Run, write: Callable[..., Path], target: Path) -> None:
    """Catches recorded states that are not those of --states online, and masks lost on the way."""
    file = write("chats.jsonl", CHAT, CHAT, OTHER)
    (recorded,) = run.shards("--corpus", file)
    size = f"corpus: {3 * CHAT_TOKENS} tokens of 265 bytes; 0.000 GB to write into {run.work_folder}/texts, "
    assert re.fullmatch(rf"{re.escape(size)}[\d.]+ GB free there\n", run.printed)
    assert recorded.lengths == [CHAT_TOKENS] * 3
    assert recorded.is_answer.sum() == 3 * 3  # two tokens of text and the end token
    computed = target_states(run.args(), target)(recorded.token_ids, recorded.lengths)
    assert recorded.features is not None
    assert torch.equal(recorded.features, computed.to(torch.bfloat16))
    run.work_folder /= "online"
    (bare,) = run.shards("--corpus", file, "--states", "online")
    assert bare.features is None
    assert torch.equal(bare.token_ids, recorded.token_ids)


def test_all_sources_together(run: Run, write: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a source that is left out, shards in another order than given, and texts that are not shuffled."""
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    shard = Shard(torch.arange(4), torch.arange(4) > 1, [4], torch.zeros(4, 4 * HIDDEN, dtype=torch.bfloat16))
    save_shard(shard, earlier / "shard-00000.safetensors")
    chats = write("chats.jsonl", CHAT, CHAT, OTHER)
    write("plain/b.txt", "b" * 8)
    write("plain/a.txt", "a" * 21)
    write("plain/notes.md", "left out")
    sources = ("--corpus", chats, "--corpus", earlier, "--corpus", tmp_path / "plain", "--window", 10)
    folders = run(*sources)
    assert folders == [earlier, run.work_folder / "texts"]
    (texts,) = [read_shard(file) for file in shard_files(folders[1])]
    assert sorted(texts.lengths) == [4, 10, 10] + [CHAT_TOKENS] * 3  # "bb" is one token, one "a" is too short
    assert texts.lengths != [CHAT_TOKENS] * 3 + [10, 10, 4]
    assert run(*sources) == folders


def test_bytes_need_no_tokenizer(tiny_models: TinyModels, tmp_path: Path, write: Callable[..., Path]) -> None:
    """Catches a byte-level target that is refused for a tokenizer it has no use for, or trained on an end token."""
    target = tiny_models.target(num_hidden_layers=LAYERS, vocab_size=256, max_position_embeddings=CONTEXT)
    run = Run(target, tmp_path / "work")
    text = "Grüße, 世界!\n" * 9
    arguments = ("--corpus", write("a.txt", text), "--text-encoding", "bytes", "--window", 200)
    with pytest.raises(ValueError, match="--window: must be between 3 and 64"):
        run(*arguments)
    (shard,) = run.shards(*arguments[:-1], CONTEXT)
    windows = [bytes(piece.tolist()) for piece in shard.token_ids.split(shard.lengths)]
    cuts = [text.encode()[start : start + CONTEXT] for start in range(0, len(text.encode()), CONTEXT)]
    assert sorted(windows) == sorted(cuts)
    assert stop_token(run.args("--text-encoding", "bytes"), target) is None
    with pytest.raises(ValueError, match="--target: .*; a byte-level target needs --text-encoding bytes"):
        run(*arguments[:2])


def test_windows_begin_as_the_tokenizer_begins_texts(
    tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None], tmp_path: Path, write: Callable[..., Path]
) -> None:
    """Catches windows without the token that the target has seen before every text."""
    target = tiny_models.target(num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    save_chat_tokenizer(target, adds_bos=True)
    (shard,) = Run(target, tmp_path / "work").shards("--corpus", write("a.txt", "a" * 7), "--window", 5)
    assert [piece[0].item() for piece in shard.token_ids.split(shard.lengths)] == [257, 257]
    assert sorted(shard.lengths) == [4, 5]


def test_an_interrupted_recording_goes_on(
    run: Run, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches shards that are recorded again, a target loaded although nothing is missing, and a size that counts what
    is there."""
    monkeypatch.setattr(text_corpus.shards_of, "__defaults__", (2 * CHAT_TOKENS * 265,))
    file = write("chats.jsonl", *[CHAT, OTHER] * 3)
    folder = run("--corpus", file)[0]
    files = shard_files(folder)
    assert len(files) == 3
    kept = files[0].stat().st_mtime_ns
    files[1].unlink()
    assert run("--corpus", file) == [folder]
    assert f"{6 * CHAT_TOKENS} tokens" in run.printed
    assert shard_files(folder) == files
    assert files[0].stat().st_mtime_ns == kept
    monkeypatch.setattr(corpus_options, "target_states", None)
    assert run("--corpus", file) == [folder]


def test_what_has_changed_is_refused(run: Run, write: Callable[..., Path]) -> None:
    """Catches texts of two versions of a file in one corpus, and states in two precisions."""
    file = write("chats.jsonl", CHAT, CHAT, OTHER)
    run("--corpus", file)
    with pytest.raises(ValueError, match="states was recorded in float32, now it is online"):
        run("--corpus", file, "--states", "online")
    with pytest.raises(ValueError, match="max_length was 64, now it is 60"):
        run("--corpus", file, "--max-length", 60)
    write("chats.jsonl", CHAT, OTHER, CHAT, CHAT)
    with pytest.raises(ValueError, match=r"chats\.jsonl has changed since"):
        run("--corpus", file)


def test_a_full_disk_is_seen_first(run: Run, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a target that is loaded, or a folder that is made, before the disk is asked."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    monkeypatch.setattr(corpus_options, "target_states", None)
    file = write("chats.jsonl", CHAT, CHAT, OTHER)
    with pytest.raises(ValueError, match=r"--corpus: the corpus needs 0\.000 GB in .*texts"):
        run("--corpus", file)
    with pytest.raises(ValueError, match=r"--corpus-tokens: the corpus needs about .* GB in .*corpus"):
        run("--corpus-tokens", 1000, "--answer-tokens", 8, "--user-tokens", 8, "--max-length", 60, "--prompts",
            write("prompts.jsonl", {"prompt": "a"}, {"prompt": "b"}))  # fmt: skip
    assert not run.work_folder.exists()


def test_long_conversations_are_cut_and_few_are_warned_of(run: Run, write: Callable[..., Path]) -> None:
    """Catches a cut or a tiny corpus that goes unsaid, and lines that are broken at a terminal's width."""
    file = write("chats.jsonl", CHAT, OTHER, LONG_CHAT)
    args = ("--corpus", file, "--states", "online")
    (shard,) = run.shards(*args)
    assert sorted(shard.lengths) == [CHAT_TOKENS, CHAT_TOKENS]
    assert run.printed.splitlines()[0] == (
        f"--corpus: {file}: 1 of 3 conversations are longer than 64 tokens (--max-length) and were cut; 1 had no "
        "answer left and were left out"
    )
    assert "warning" not in run.printed
    few = ("--corpus", write("a.txt", "a" * 40), "--window", 20)
    run.work_folder /= "few"
    run(*few)
    assert run.printed.splitlines()[0] == (
        "warning: --corpus: 40 tokens are fewer than 5 batches of 10 (--batch-tokens); the head will learn them by "
        "heart: give more texts"
    )


REFUSED: dict[str, tuple[list[Any], str]] = {
    "missing": (["--corpus", "nowhere.jsonl"], "--corpus: nowhere.jsonl does not exist; check the path"),
    "empty": (["--corpus", ("a.txt", "")], "--corpus: FILE is empty or holds blank lines only; put texts into it"),
    "blank": (
        ["--corpus", ("a.jsonl", " ", "")],
        "--corpus: FILE is empty or holds blank lines only; put texts into it",
    ),
    "binary": (["--corpus", ("a.txt", "x", "\0")], "--corpus: FILE, line 2: is binary (a NUL byte); give UTF-8 text"),
    "one line": (
        ["--corpus", ("a.jsonl", CHAT)],
        "--corpus: FILE: holds 1 conversation to train on, at least 2 are needed, one of them for validation; add "
        "texts",
    ),
    "one window": (
        ["--corpus", ("a.txt", "a" * 21), "--window", 20],
        "--corpus: FILE holds 1 window of up to 20 tokens (--window), at least 2 are needed, one of them for "
        "validation; add text or lower --window",
    ),
    "one token": (
        ["--corpus", ("a.txt", "a")],
        "--corpus: FILE holds 0 windows of up to 64 tokens (--window), at least 2 are needed, one of them for "
        "validation; add text or lower --window",
    ),
    "not JSON": (
        ["--corpus", ("a.jsonl", CHAT, "text")],
        "--corpus: FILE, line 2: is not JSON (Expecting value); write one JSON object a line (JSONL)",
    ),
    "wrong keys": (
        ["--corpus", ("a.jsonl", {"prompt": "a"})],
        'FILE, line 1: holds `prompt`; expected `messages` (a list of {"role", "content"}) or `conversations` (a list '
        'of {"from", "value"})',
    ),
    "one prompt of chats": (
        ["--corpus", ("a.jsonl", CHAT, CHAT)],
        "--corpus: FILE: all 2 conversations begin with the same prompt, at least 2 are needed, one of them for "
        "validation; add others",
    ),
    "unknown name": (
        ["--corpus", ("a.md", "text")],
        "--corpus: FILE: its name does not say what it holds; let it end in .jsonl for chats or in .txt for plain text",
    ),
    "all too long": (
        ["--corpus", ("a.jsonl", LONG_CHAT, LONG_CHAT)],
        "--corpus: FILE: all 2 conversations are longer than 64 tokens, the shortest has 68; raise --max-length (the "
        "target's context is 64) or give shorter conversations",
    ),
    "twice": (["--corpus", "/x", "--corpus", "/x"], "--corpus: /x is given twice; give it once"),
    "with prompts": (
        ["--corpus", "/x", "--prompts", "/y"],
        "--prompts: is for a corpus the target writes, not with --corpus; leave one of them out, or write the answers "
        "in a run of their own and give its corpus folder as a further --corpus",
    ),
    "beyond the context": (
        ["--corpus", "/x", "--max-length", 65],
        "--max-length: must be between 3 and the target's context of 64, got 65",
    ),
    "window beyond the length": (
        ["--corpus", "/x", "--max-length", 50, "--window", 51],
        "--window: must be between 3 and 50 (--max-length, at most the target's context), got 51",
    ),
    "bytes of chats": (
        ["--corpus", ("a.jsonl", CHAT, CHAT), "--text-encoding", "bytes"],
        "--text-encoding: bytes is for plain text, but FILE holds chats; use tokens",
    ),
    "bytes of nothing": (
        ["--text-encoding", "bytes"],
        "--text-encoding: bytes is for plain text; give a .txt file with --corpus",
    ),
    "one prompt": (
        ["--prompts", ("p.jsonl", {"prompt": "a"}, {"prompt": "a"}), "--answer-tokens", 8],
        "--prompts: FILE: holds 1 prompt to train on, at least 2 are needed, one of them for validation; add prompts",
    ),
    "long prompts": (
        ["--prompts", ("p.jsonl", {"prompt": "a" * 60}, {"prompt": "b" * 114}), "--answer-tokens", 8],
        "--prompts: FILE: with an answer of 8 tokens (--answer-tokens) all 2 prompts are longer than 64 tokens, the "
        "shortest has 57; raise --max-length, lower --answer-tokens or give shorter prompts",
    ),
    "missing prompts": (["--prompts", "nowhere.jsonl"], "--prompts: nowhere.jsonl does not exist; check the path"),
    "share": (["--greedy-share", 1.5], "--greedy-share: must be between 0 and 1, got 1.5"),
    "temperature": (
        ["--answer-temperature", 0],
        "--answer-temperature: must be above 0, got 0.0; --greedy-share 1 makes all answers greedy",
    ),
    "no tokens": (["--corpus-tokens", 0], "--corpus-tokens: must be at least 1, got 0"),
    "no room for turns": (
        ["--answer-tokens", 8],
        "--user-tokens, --answer-tokens: 64 and 8 leave no room for the chat template in the target's context of 64; "
        "lower them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_first(
    name: str, run: Run, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an error without option, file, line or remedy, and one that comes after the target was loaded."""
    monkeypatch.setattr(corpus_options, "target_states", None)
    monkeypatch.setattr(own_corpus, "write_in_processes", None)
    arguments, message = REFUSED[name]
    files = [write(*argument) for argument in arguments if isinstance(argument, tuple)]
    paths = iter(files)
    whole = message.replace("FILE", str(files[0])) if files else message
    with pytest.raises(ValueError, match=f"{re.escape(whole)}$") as error:
        run(*(next(paths) if isinstance(argument, tuple) else argument for argument in arguments))
    assert str(error.value).startswith("--")
    assert not run.work_folder.exists()


def test_a_folder_without_texts_is_refused(run: Run, write: Callable[..., Path]) -> None:
    """Catches a mistyped folder into which a new corpus would be written for an hour."""
    folder = write("plain/notes.md", "text").parent
    whole = (
        f"--corpus: {folder} holds no shard of a corpus and no .txt file; name a file or another folder, or leave "
        "--corpus out to let the target write a corpus"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        run("--corpus", folder)
    assert not run.work_folder.exists()


def test_a_folder_of_mixed_files_is_refused(run: Run, write: Callable[..., Path]) -> None:
    """Catches chats beside plain text that nobody trains on."""
    write("mixed/a.txt", "A text of some words.")
    folder = write("mixed/b.jsonl", "{}").parent
    with pytest.raises(ValueError, match=r"--corpus: .*mixed holds b\.jsonl beside its \.txt files"):
        run("--corpus", folder)


@pytest.mark.parametrize("name", ["corpus", "texts"])
def test_a_work_folder_is_no_corpus(name: str, run: Run, write: Callable[..., Path]) -> None:
    """Catches a remedy that leads elsewhere when an earlier run was named, not the corpus inside."""
    folder = write(f"run/{name}/shard-00000.safetensors", "").parent
    with pytest.raises(ValueError, match=f"--corpus: .*run holds no shard .*; give {re.escape(str(folder))}, or leave"):
        run("--corpus", folder.parent)


def test_a_small_vocabulary_has_no_bytes(tiny_models: TinyModels, tmp_path: Path, write: Callable[..., Path]) -> None:
    """Catches ids past the end of the target's embedding."""
    target = tiny_models.target(num_hidden_layers=LAYERS, vocab_size=255)
    arguments = ("--corpus", write("a.txt", "a" * 90), "--text-encoding", "bytes", "--window", 20)
    with pytest.raises(ValueError, match="--text-encoding: bytes needs the ids 0 to 255, the target has 255; use"):
        Run(target, tmp_path / "work")(*arguments)


def test_the_tokenizer_of_another_model_is_refused(
    tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None], tmp_path: Path, write: Callable[..., Path]
) -> None:
    """Catches ids past the end of the target's embedding."""
    target = tiny_models.target(num_hidden_layers=LAYERS, vocab_size=200, max_position_embeddings=CONTEXT)
    save_chat_tokenizer(target)
    with pytest.raises(ValueError, match="--target: its tokenizer gives the id 259 for .*, but its vocabulary ends"):
        Run(target, tmp_path / "work")("--corpus", write("a.jsonl", CHAT, OTHER))


def test_a_target_without_chat_template_is_refused(
    tiny_models: TinyModels, save_chat_tokenizer: Callable[..., None], tmp_path: Path, write: Callable[..., Path]
) -> None:
    """Catches a trace where chats or invented turns need a template."""
    target = tiny_models.target(num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    save_chat_tokenizer(target, template=None)
    run = Run(target, tmp_path / "work")
    with pytest.raises(ValueError, match="holds chats, but the target has no chat template; give a .txt file"):
        run("--corpus", write("a.jsonl", CHAT, CHAT))
    with pytest.raises(ValueError, match="--target: has no chat template, so it cannot invent user turns; use"):
        run()


def test_shards_without_states_need_the_target(run: Run, write: Callable[..., Path]) -> None:
    """Catches a folder of bare texts that fails in the trainer."""
    (folder,) = run("--corpus", write("chats.jsonl", CHAT, CHAT, OTHER), "--states", "online")
    with pytest.raises(ValueError, match="--corpus: .* holds texts without the target's states; use --states online"):
        run("--corpus", folder)
    assert run("--corpus", folder, "--states", "online") == [folder]


def test_length_and_end_of_texts(run: Run, target: Path) -> None:
    """Catches texts above the target's context by default, and an end token that is not the tokenizer's."""
    config = DecoderConfig.from_folder(target)
    assert text_length(run.args(), config) == CONTEXT
    assert text_length(run.args("--max-length", 50), config) == 50
    assert stop_token(run.args(), target) == 258


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[CorpusJob]:
    """Keeps the jobs of corpus writers, which write one shard each of the tokens asked for, or of 9."""
    jobs: list[CorpusJob] = []

    def write(given: list[CorpusJob]) -> None:
        jobs.extend(given)
        count = 9 if given[0].config.greedy_share == 1.0 else given[0].config.num_tokens
        shard = Shard(torch.zeros(count + 1, dtype=torch.int64), torch.arange(count + 1) > 0, [count + 1], None)
        save_shard(shard, text_corpus.shard_file(given[0].folder, 0))

    monkeypatch.setattr(own_corpus, "write_in_processes", write)
    return jobs


def test_options_reach_the_writers(run: Run, write: Callable[..., Path], writers: list[CorpusJob]) -> None:
    """Catches an option that is read and forgotten, and a small corpus that is written in rounds far too large."""
    file = write("p.jsonl", {"prompt": "a"}, {"turns": ["b", "c"]}, {"prompt": "a"}, {"prompt": "a" * 60})
    arguments = ["--prompts", file, "--answer-tokens", 5, "--corpus-tokens", 41, "--writers", 2, "--states", "online"]
    assert run(*arguments, "--answer-temperature", 0.5, "--greedy-share", 0.25) == [run.work_folder / "corpus"]
    assert [job.writer.index for job in writers] == [0, 1]
    job = writers[0]
    assert job.prompts is not None
    assert len(job.prompts) == 2
    assert not job.records_states
    config = job.config
    assert (config.max_answer_tokens, config.num_tokens, config.greedy_share) == (5, 41, 0.25)
    assert (config.answer_temperature, config.conversations_per_shard) == (0.5, 5)
    lines = run.printed.splitlines()
    assert lines[0] == (
        f"--prompts: {file}: 1 of 4 prompts are repeated, 1 are longer than 59 tokens (--max-length less "
        "--answer-tokens); these were left out"
    )
    assert lines[1].startswith("corpus: about ")
    assert lines[2] == "2 prompts; 41 answer tokens take 4.1 passes or more over them"
    run(*arguments, "--answer-temperature", 0.5, "--greedy-share", 0.25)
    assert len(writers) == 2  # it is there
    with pytest.raises(ValueError, match=r"greedy_share was 0\.25, now it is 0\.6"):
        run(*arguments, "--answer-temperature", 0.5)


def test_a_larger_corpus_keeps_its_rounds(run: Run, write: Callable[..., Path], writers: list[CorpusJob]) -> None:
    """Catches a corpus that is asked for more tokens and then walks its prompts in rounds of another size."""
    file = write("p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    arguments = ["--prompts", file, "--answer-tokens", 5, "--states", "online", "--corpus-tokens"]
    run(*arguments, 41)
    run(*arguments, 4100)
    assert len({job.config.conversations_per_shard for job in writers}) == 1
    assert writers[-1].config.num_tokens == 4100


def test_prompts_that_are_used_up_are_reported(run: Run, write: Callable[..., Path], writers: list[CorpusJob]) -> None:
    """Catches a corpus smaller than asked for that goes unsaid, and writers started in vain when a run goes on."""
    file = write("p.jsonl", *({"prompt": letter} for letter in "abc"))
    arguments = ("--prompts", file, "--greedy-share", 1, "--answer-tokens", 5, "--corpus-tokens", 500, "--writers", 1)
    for num_jobs in (1, 1):
        run(*arguments, "--states", "online")
        assert (
            f"--prompts: {file} is used up: every prompt has its greedy answer, which would only be repeated; the "
            "corpus holds 9 of 500 answer tokens (--corpus-tokens); for more, add prompts or start anew with a lower "
            "--greedy-share"
        ) in run.printed
        assert len(writers) == num_jobs
