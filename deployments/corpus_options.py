"""Where `eyas train KIND` gets its texts from: the options, and ready corpus folders made from them."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console

from eyas.deployments.given_texts import GivenTexts, record_texts
from eyas.deployments.own_corpus import write_own_texts
from eyas.deployments.tokenizer import Tokenizer
from eyas.models.config import DecoderConfig
from eyas.models.target_loading import load_target_decoder
from eyas.training.generation import CorpusConfig
from eyas.training.shard import count_rows, holds_states, shard_files
from eyas.training.states import TargetStates, recorded_layers
from eyas.training.texts import warning_if_few
from eyas.workers.loading import DTYPES
from eyas.workers.self_check import check_target

CPU = torch.device("cpu")
BYTES = "bytes"
ONLINE = "online"
_MAX_LENGTH = 2048
_WINDOW = 512


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options that `prepare_corpus` reads."""
    defaults = CorpusConfig()
    group = parser.add_argument_group(
        "corpus", "the texts to train on; the target writes them unless --corpus is given"
    )
    group.add_argument(
        "--corpus", type=Path, action="append",
        help="train on these texts instead: the corpus folder of an earlier run, a JSONL file of chats (`messages`, or "
        "`conversations` of ShareGPT), a .txt file or a folder of them; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--prompts", type=Path,
        help="JSONL file of prompts for the target to answer instead of user turns it invents: `messages` or `turns`, "
        "put into its chat template, or `prompt`, taken as it is",
    )  # fmt: skip
    group.add_argument("--corpus-tokens", type=int, default=defaults.num_tokens, help="answer tokens the target writes")
    group.add_argument(
        "--greedy-share", type=float, default=defaults.greedy_share, help="of answers; the rest are sampled"
    )
    group.add_argument(
        "--answer-temperature", type=float, default=defaults.answer_temperature, help="of the sampled answers"
    )
    group.add_argument("--answer-tokens", type=int, default=defaults.max_answer_tokens, help="longest answer it writes")
    group.add_argument(
        "--user-tokens", type=int, default=defaults.max_user_tokens,
        help="longest user turn it invents, given first words aside",
    )  # fmt: skip
    group.add_argument(
        "--opener-share", type=float, default=defaults.opener_share,
        help="of the user turns it invents: begin with the words of a common kind of request, in English",
    )  # fmt: skip
    group.add_argument(
        "--writers", type=int, default=os.cpu_count() or 1, help="processes that write the corpus, one thread each"
    )
    group.add_argument(
        "--max-length", type=int,
        help=f"tokens a conversation is cut to; default {_MAX_LENGTH}, or the target's context if that is shorter",
    )  # fmt: skip
    group.add_argument(
        "--window", type=int, help=f"tokens of the pieces plain text is cut into; default {_WINDOW} or --max-length"
    )
    group.add_argument(
        "--text-encoding", choices=["tokens", BYTES], default="tokens",
        help="of plain text: the target's tokenizer, or UTF-8 bytes as the ids 0 to 255 for a byte-level target",
    )  # fmt: skip
    group.add_argument(
        "--states", choices=["recorded", ONLINE], default="recorded",
        help="the target's states at the texts: recorded once on disk, or computed whenever a batch needs them",
    )  # fmt: skip


def prepare_corpus(
    args: argparse.Namespace,
    target_folder: Path,
    target: DecoderConfig,
    console: Console,
    device: torch.device = CPU,
) -> list[Path]:
    """Folders with the shards to train on. What is not there yet is written into `args.work_dir`.

    All that can be wrong with the files is found before the target is loaded.

    Raises:
        ValueError: naming option, file, line and remedy.
    """
    max_length = text_length(args, target)
    tokenizer = text_tokenizer(args, target_folder)
    if not args.corpus:
        _check_own(args, tokenizer, target)
        assert tokenizer is not None
        folder = write_own_texts(args, target_folder, target, tokenizer, max_length, console, device)
        _warn(console, count_rows(shard_files(folder)), args.batch_tokens, "--corpus-tokens")
        return [folder]
    if args.prompts is not None:
        raise ValueError(
            "--prompts: is for a corpus the target writes, not with --corpus; leave one of them out, or write the "
            "answers in a run of their own and give its corpus folder as a further --corpus"
        )
    _check_paths(args.corpus)
    shard_folders = [path for path in args.corpus if shard_files(path)]
    for folder in shard_folders:
        if args.states != ONLINE and not all(holds_states(file) for file in shard_files(folder)):
            raise ValueError(f"--corpus: {folder} holds texts without the target's states; use --states online")
    paths = [path for path in args.corpus if path not in shard_folders]
    texts = GivenTexts.read(paths, tokenizer, target, max_length, _window(args, max_length)) if paths else None
    num_tokens = sum(count_rows(shard_files(folder)) for folder in shard_folders)
    if texts is not None:
        for note in texts.notes:
            console.print(note, soft_wrap=True, highlight=False)
        num_tokens += texts.num_tokens
    _warn(console, num_tokens, args.batch_tokens, "--corpus")
    if texts is None:
        return shard_folders

    def load_states() -> TargetStates:
        return target_states(args, target_folder, device)

    return [*shard_folders, record_texts(texts, args, target_folder, target, console, load_states)]


def stop_token(args: argparse.Namespace, target_folder: Path) -> int | None:
    """The token that ends an answer; None for a target whose texts are bytes, or whose tokenizer has none."""
    tokenizer = text_tokenizer(args, target_folder)
    token_id = None if tokenizer is None else tokenizer.raw.eos_token_id
    return None if token_id is None else int(token_id)


def target_states(args: argparse.Namespace, target_folder: Path, device: torch.device = CPU) -> TargetStates:
    """The target, loaded to compute the states a corpus holds; what `--states online` gives the trainer."""
    model = load_target_decoder(target_folder, DTYPES[args.dtype], device)
    check_target(model)
    return TargetStates(model, recorded_layers(model.config))


def text_length(args: argparse.Namespace, target: DecoderConfig) -> int:
    """Tokens a conversation may have: `--max-length` or its default; `ValueError` above the target's context."""
    context: int = target.max_positions
    if args.max_length is None:
        return min(_MAX_LENGTH, context)
    length: int = args.max_length
    if not 3 <= length <= context:
        raise ValueError(f"--max-length: must be between 3 and the target's context of {context}, got {length}")
    return length


def text_tokenizer(args: argparse.Namespace, target_folder: Path) -> Tokenizer | None:
    """The target's tokenizer; None where texts are bytes, whose target need not have one."""
    if args.text_encoding == BYTES:
        return None
    try:
        return Tokenizer.from_folder(target_folder)
    except ValueError as error:
        reason = str(error).removeprefix("model: ")
        raise ValueError(f"--target: {reason}; a byte-level target needs --text-encoding {BYTES}") from error


def _window(args: argparse.Namespace, max_length: int) -> int:
    if args.window is None:
        return min(_WINDOW, max_length)
    window: int = args.window
    if not 3 <= window <= max_length:
        raise ValueError(
            f"--window: must be between 3 and {max_length} (--max-length, at most the target's context), got {window}"
        )
    return window


def _check_paths(paths: list[Path]) -> None:
    repeated = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if repeated:
        raise ValueError(f"--corpus: {repeated[0]} is given twice; give it once")


def _check_own(args: argparse.Namespace, tokenizer: Tokenizer | None, target: DecoderConfig) -> None:
    if tokenizer is None:
        raise ValueError(f"--text-encoding: {BYTES} is for plain text; give a .txt file with --corpus")
    if args.prompts is None and not tokenizer.has_chat_template:
        raise ValueError("--target: has no chat template, so it cannot invent user turns; use --prompts or --corpus")


def _warn(console: Console, num_tokens: int, tokens_per_batch: int, option: str) -> None:
    warning = warning_if_few(num_tokens, tokens_per_batch, option)
    if warning is not None:
        console.print(warning, style="yellow", soft_wrap=True, highlight=False)
