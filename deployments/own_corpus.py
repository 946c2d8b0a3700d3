"""Texts the target writes itself: the options checked, the size announced, the writers started."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from eyas.deployments.corpus_size import announce_size
from eyas.deployments.corpus_writers import TEMPLATE_TOKENS, CorpusJob, write_in_processes
from eyas.deployments.prompts import read_prompts
from eyas.deployments.tokenizer import Tokenizer
from eyas.models.config import DecoderConfig
from eyas.training.corpus import Writer
from eyas.training.generation import CorpusConfig
from eyas.training.shard import count_answer_tokens, count_rows, shard_files
from eyas.training.states import recorded_layers
from eyas.training.text_corpus import MANIFEST, Manifest, bytes_per_token, shard_file

_SHARD = "conversations_per_shard"


def write_own_texts(
    args: argparse.Namespace,
    target_folder: Path,
    target: DecoderConfig,
    tokenizer: Tokenizer,
    max_length: int,
    console: Console,
    device: torch.device,
) -> Path:
    """Write a corpus into the work folder, unless it is there; goes on where it was interrupted.

    Raises:
        ValueError: for options or prompts that cannot work, a folder that holds something else, or a full disk.
    """
    folder: Path = args.work_dir / "corpus"
    num_writers: int = args.writers
    config = _config(args, num_writers)
    prompts = None if args.prompts is None else _prompts(args.prompts, tokenizer, config, max_length, console)
    if prompts is None and config.max_user_tokens + TEMPLATE_TOKENS + config.max_answer_tokens > target.max_positions:
        raise ValueError(
            f"--user-tokens, --answer-tokens: {config.max_user_tokens} and {config.max_answer_tokens} leave no room "
            f"for the chat template in the target's context of {target.max_positions}; lower them"
        )
    manifest, config = _manifest(args, target_folder, folder, config)
    manifest.check(folder)
    files = shard_files(folder)
    written = count_answer_tokens(files)
    if written < config.num_tokens and not _is_used_up(folder, prompts, config):
        num_states = len(recorded_layers(target)) if args.states == "recorded" else 0
        rows_per_answer = 1 + _prompt_tokens(prompts, config) / config.max_answer_tokens
        num_missing = round((config.num_tokens - written) * rows_per_answer)
        token_bytes = bytes_per_token(num_states, target.hidden_size)
        num_rows = num_missing + count_rows(files)
        announce_size(console, folder, num_rows, token_bytes, num_missing, "--corpus-tokens", about="about ")
        if prompts is not None:
            _announce_passes(prompts, config, console)
        manifest.claim(folder)
        writers = [Writer(index, num_writers) for index in range(num_writers)]
        write_in_processes(
            [
                CorpusJob(target_folder, folder, config, args.dtype, writer, prompts, num_states > 0, str(device))
                for writer in writers
            ]
        )
        written = count_answer_tokens(shard_files(folder))
    if written < config.num_tokens:
        console.print(
            f"--prompts: {args.prompts} is used up: every prompt has its greedy answer, which would only be repeated; "
            f"the corpus holds {written:,} of {config.num_tokens:,} answer tokens (--corpus-tokens); for more, add "
            "prompts or start anew with a lower --greedy-share",
            style="yellow", soft_wrap=True, highlight=False,
        )  # fmt: skip
    return folder


def _config(args: argparse.Namespace, num_writers: int) -> CorpusConfig:
    """The options as a `CorpusConfig`; a small corpus is written in small rounds, so that it does not get too large."""
    options = {
        "--corpus-tokens": args.corpus_tokens, "--answer-tokens": args.answer_tokens,
        "--user-tokens": args.user_tokens, "--writers": num_writers,
    }  # fmt: skip
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")
    for name, share in {"--greedy-share": args.greedy_share, "--opener-share": args.opener_share}.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name}: must be between 0 and 1, got {share}")
    if not args.answer_temperature > 0.0:
        raise ValueError(
            f"--answer-temperature: must be above 0, got {args.answer_temperature}; --greedy-share 1 makes all answers "
            "greedy"
        )
    num_answers = -(-args.corpus_tokens // args.answer_tokens)
    return CorpusConfig(
        num_tokens=args.corpus_tokens,
        conversations_per_shard=max(2, min(CorpusConfig().conversations_per_shard, -(-num_answers // num_writers))),
        max_user_tokens=args.user_tokens,
        max_answer_tokens=args.answer_tokens,
        greedy_share=args.greedy_share,
        opener_share=args.opener_share,
        answer_temperature=args.answer_temperature,
        seed=args.seed,
    )


def _manifest(
    args: argparse.Namespace, target_folder: Path, folder: Path, config: CorpusConfig
) -> tuple[Manifest, CorpusConfig]:
    """What decides over the texts, and the config with the rounds of the corpus that is there."""
    file = folder / MANIFEST
    if file.exists():
        written = json.loads(file.read_text())["options"].get(_SHARD, config.conversations_per_shard)
        config = replace(config, conversations_per_shard=written)
    options = {
        "target": str(target_folder),
        "dtype": args.dtype,
        "states": args.states,
        "greedy_share": config.greedy_share,
        "answer_temperature": config.answer_temperature,
        "answer_tokens": config.max_answer_tokens,
        "seed": config.seed,
        _SHARD: config.conversations_per_shard,
    }
    if args.prompts is None:
        options |= {"user_tokens": config.max_user_tokens, "opener_share": config.opener_share}
    return Manifest.of([] if args.prompts is None else [args.prompts], options), config


def _prompts(
    file: Path, tokenizer: Tokenizer, config: CorpusConfig, max_length: int, console: Console
) -> list[list[int]]:
    """Distinct prompts whose answers fit, in the file's order."""
    given = read_prompts(file, tokenizer, "--prompts")
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in given))
    room = max_length - config.max_answer_tokens
    kept = [list(prompt) for prompt in distinct if len(prompt) <= room]
    if distinct and not kept:
        raise ValueError(
            f"--prompts: {file}: with an answer of {config.max_answer_tokens} tokens (--answer-tokens) all "
            f"{len(distinct)} prompts are longer than {max_length} tokens, the shortest has {min(map(len, distinct))}; "
            "raise --max-length, lower --answer-tokens or give shorter prompts"
        )
    if len(kept) < 2:
        raise ValueError(
            f"--prompts: {file}: holds 1 prompt to train on, at least 2 are needed, one of them for validation; add "
            "prompts"
        )
    if len(kept) < len(given):
        console.print(
            f"--prompts: {file}: {len(given) - len(distinct)} of {len(given)} prompts are repeated, "
            f"{len(distinct) - len(kept)} are longer than {room} tokens (--max-length less --answer-tokens); "
            "these were left out",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    return kept


def _announce_passes(prompts: list[list[int]], config: CorpusConfig, console: Console) -> None:
    at_least = config.num_tokens / (len(prompts) * config.max_answer_tokens)
    console.print(
        f"{len(prompts):,} prompts; {config.num_tokens:,} answer tokens take {at_least:.1f} passes or more over them",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _is_used_up(folder: Path, prompts: list[list[int]] | None, config: CorpusConfig) -> bool:
    """Whether every round that there is has been written."""
    if prompts is None or config.greedy_share < 1.0:
        return False
    num_rounds = -(-len(prompts) // config.conversations_per_shard)
    return all(shard_file(folder, index).exists() for index in range(num_rounds))


def _prompt_tokens(prompts: list[list[int]] | None, config: CorpusConfig) -> float:
    """Of a typical prompt, rather too many."""
    if prompts is None:
        return config.max_user_tokens + TEMPLATE_TOKENS / 2
    return sum(len(prompt) for prompt in prompts) / len(prompts)
