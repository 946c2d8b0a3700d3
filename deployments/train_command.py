"""`eyas train KIND`: wires the offline engine to the corpus writer, then trains a draft head, then saves it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.progress import progress_bar
from eyas.deployments.scheduler import TreeShape
from eyas.models.catalog import DEFAULT_TARGET, resolve_target
from eyas.models.config import DecoderConfig
from eyas.training.corpus import (
    CorpusConfig,
    GeneratedText,
    GenerationJob,
    UserTurnTemplate,
    Writer,
    count_answer_tokens,
    shard_files,
    write_corpus,
)
from eyas.training.export import draw_curve
from eyas.training.methods import KINDS
from eyas.training.progress import TrainingProgress
from eyas.training.recording import FeatureRecorder
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.validation import Validation
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.loading import EngineSpec, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

_PAGE_SIZE = 16
_TEMPLATE_TOKENS = 128  # room for what the chat template puts around a turn
_WRITER_BATCH = 64
_POLL_S = 1.0
_NAMES = {"eagle3": "an EAGLE-3", "eagle": "an EAGLE-1", "medusa": "a Medusa", "mtp": "an MTP"}
_MEDUSA_HEADS = 4
_MATRIX_RATES = {"eagle": 3e-3}  # nothing norms what its attention reads: at the rate of the others its states run away


def recorded_layers(config: DecoderConfig) -> tuple[int, ...]:
    """What the corpus keeps: the states EAGLE-3 fuses, and the last one, which gives the target's distribution."""
    return (*config.default_aux_layers(), config.num_layers)


@dataclass(frozen=True, slots=True)
class CorpusJob:
    """What one corpus-writing process needs; picklable."""

    target_folder: Path
    folder: Path
    config: CorpusConfig
    batch_size: int
    dtype: str
    writer: Writer


def write_own_corpus(job: CorpusJob) -> None:
    """Run one corpus writer in this process, on one thread: the writers share the cores without waiting on another."""
    torch.set_num_threads(1)
    config = job.config
    longest = config.max_user_tokens + config.max_answer_tokens + _TEMPLATE_TOKENS
    num_pages = job.batch_size * -(-longest // _PAGE_SIZE)
    spec = EngineSpec(str(job.target_folder), None, job.dtype, "cpu", num_pages, _PAGE_SIZE, num_threads=1)
    model = load_target(spec).model
    target = TargetRunner(model, PoolLayout(num_pages, _PAGE_SIZE), recorded_layers(model.config))
    recorder = FeatureRecorder()
    engine = OfflineEngine(
        LocalWorkers(target, recorder), PageAllocator(num_pages, _PAGE_SIZE), TreeShape(), job.batch_size
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(job.target_folder)
    stop_token_id = int(tokenizer.eos_token_id)

    def generate(jobs: list[GenerationJob]) -> list[GeneratedText]:
        stop = frozenset({stop_token_id})
        outputs = engine.generate(
            [
                OfflineRequest(
                    text.prompt_ids, SamplingParams(text.temperature, text.top_p, text.seed), text.max_tokens, stop
                )
                for text in jobs
            ]
        )
        return [GeneratedText(output.request_id, output.token_ids) for output in outputs]

    write_corpus(job.folder, config, UserTurnTemplate.of(tokenizer), generate, recorder, stop_token_id, job.writer)


def write_own_corpus_in_processes(jobs: list[CorpusJob]) -> None:
    """Run one process per job until the corpus is complete, with a bar of its answer tokens.

    Raises:
        RuntimeError: if a writer fails; the others are ended, and complete shards stay.
    """
    folder, num_tokens = jobs[0].folder, jobs[0].config.num_tokens
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_own_corpus, args=(job,), daemon=True) for job in jobs]
    with progress_bar() as progress:
        task = progress.add_task("writing the corpus", total=num_tokens, note="answer tokens")
        try:
            for writer in writers:
                writer.start()
            while any(writer.is_alive() for writer in writers):
                failed = [writer.exitcode for writer in writers if writer.exitcode]
                if failed:
                    raise RuntimeError(f"a corpus writer ended with exit code {failed[0]}; its error is above")
                progress.update(task, completed=min(num_tokens, count_answer_tokens(shard_files(folder))))
                time.sleep(_POLL_S)
        finally:
            for writer in writers:
                if writer.is_alive():
                    writer.terminate()
                    writer.join()
    failed = [writer.exitcode for writer in writers if writer.exitcode]
    if failed:
        raise RuntimeError(f"a corpus writer ended with exit code {failed[0]}; its error is above")


def add_train_parser(subparsers: Any) -> None:
    """Add `train` with a command for every kind of head to an `argparse` subparsers object."""
    train = subparsers.add_parser("train", help="train a draft head for a target")
    kinds = train.add_subparsers(dest="kind", required=True)
    for kind in KINDS:
        parser = kinds.add_parser(
            kind,
            help=f"{_NAMES[kind]} head, on a corpus the target writes itself",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        _add_options(parser, kind)


def _add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    num_cpus = os.cpu_count() or 1
    defaults = TrainingConfig(kind, num_steps=1)
    parser.add_argument("--target", default=DEFAULT_TARGET, help="target model: a Hugging Face folder or a known name")
    parser.add_argument("--out", type=Path, required=True, help="folder the head is written to")
    parser.add_argument("--work-dir", type=Path, default=Path("runs") / kind, help="log and state to resume from")
    parser.add_argument(
        "--corpus", type=Path, help="corpus of an earlier run, which every kind of head can share; it is only read"
    )
    parser.add_argument("--corpus-tokens", type=int, default=1_000_000, help="answer tokens the target writes")
    parser.add_argument(
        "--writers", type=int, default=num_cpus, help="processes that write the corpus, one thread each"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=60.0, help="train for about this long")
    length.add_argument("--steps", type=int, help="train on this many batches instead")
    if kind == "medusa":
        parser.add_argument("--num-heads", dest="num_levels", type=int, default=_MEDUSA_HEADS, help="levels it drafts")
        parser.add_argument(
            "--own-projection", action="store_true", help="train an output projection for every head, too"
        )
    else:
        parser.add_argument(
            "--ttt-steps",
            dest="num_levels",
            type=int,
            default=defaults.num_levels,
            help="steps of the training-time test",
        )
    vocabulary = ("--draft-vocab", "ids the head can propose")
    if kind != "eagle3":
        vocabulary = ("--loss-vocab", "ids the loss is taken over; the head can propose all")
    parser.add_argument(
        vocabulary[0], dest="draft_vocab", type=int, default=defaults.draft_vocab_size, help=vocabulary[1]
    )
    parser.add_argument("--batch-tokens", type=int, default=defaults.tokens_per_batch, help="rows of a batch")
    parser.add_argument(
        "--lr", type=float, default=defaults.learning_rate, help="highest rate of AdamW (norms, output projections)"
    )
    matrix_rate = _MATRIX_RATES.get(kind, defaults.matrix_rate)
    parser.add_argument("--matrix-lr", type=float, default=matrix_rate, help="highest rate of Muon (the rest)")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, the new weights and the batch order")
    parser.add_argument("--threads", type=int, default=num_cpus, help="threads to train with")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=defaults.dtype, help="what is computed in")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Carry out `eyas train KIND`; run again with the same arguments, it goes on where it was interrupted."""
    console = Console(stderr=True)
    target_folder = resolve_target(args.target)
    target = DecoderConfig.from_folder(target_folder)
    config = TrainingConfig(
        kind=args.kind,
        num_steps=args.steps,
        max_minutes=None if args.steps else args.minutes,
        draft_vocab_size=min(args.draft_vocab, target.vocab_size),
        tokens_per_batch=args.batch_tokens,
        num_levels=args.num_levels,
        has_own_projection=getattr(args, "own_projection", False),
        learning_rate=args.lr,
        matrix_rate=args.matrix_lr,
        dtype=args.dtype,
        seed=args.seed,
    )
    corpus_folder = args.corpus or args.work_dir / "corpus"
    if args.corpus and not shard_files(args.corpus):
        raise ValueError(f"--corpus: {args.corpus} holds no shard of a corpus; leave it out to write one")
    if not args.corpus and count_answer_tokens(shard_files(corpus_folder)) < args.corpus_tokens:
        corpus_config = CorpusConfig(num_tokens=args.corpus_tokens, seed=args.seed)
        writers = [Writer(index, args.writers) for index in range(max(1, args.writers))]
        jobs = [CorpusJob(target_folder, corpus_folder, corpus_config, _WRITER_BATCH, args.dtype, x) for x in writers]
        write_own_corpus_in_processes(jobs)
    torch.set_num_threads(args.threads)
    stop_token_id = int(AutoTokenizer.from_pretrained(target_folder).eos_token_id)
    trainer = HeadTrainer(config, target_folder, corpus_folder, args.work_dir, stop_token_id)
    console.print(
        f"{len(trainer.training)} conversations to train on; the {config.draft_vocab_size} ids the loss is taken over "
        f"cover {trainer.vocabulary.coverage:.2%} of their answer tokens"
    )
    with TrainingProgress(console, trainer.step) as progress:
        validation = trainer.run(progress)
    assert validation is not None
    trainer.export(args.out)
    draw_curve(args.work_dir / "log.jsonl", args.work_dir / "training-curve.png")
    Console().print(result_table(trainer, validation))
    console.print(f"head written to {args.out}, training curve to {args.work_dir / 'training-curve.png'}")
    return 0


def result_table(trainer: HeadTrainer, validation: Validation) -> Table:
    """What a head can do, by drafted level, on texts it was not trained on."""
    speed = f"{validation.chain_length:.2f} tokens per verify step of a chain of {len(validation.recall)}"
    table = Table(title=f"{trainer.step} steps in {trainer.elapsed_s / 60:.0f} min; {speed}")
    table.add_column("level")
    for rank in range(1, len(validation.recall[0]) + 1):
        table.add_column(f"in top {rank}", justify="right")
    for level, shares in enumerate(validation.recall, start=1):
        table.add_row(str(level), *(f"{share:.1%}" for share in shares))
    return table
