"""`eyas train eagle3`: wires the offline engine to the corpus writer, then trains, then saves the head."""

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
from eyas.training.eagle3_trainer import Eagle3Trainer, Eagle3TrainingConfig
from eyas.training.export import draw_curve, export_head
from eyas.training.objective import Validation
from eyas.training.progress import TrainingProgress
from eyas.training.recording import FeatureRecorder
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.loading import EngineSpec, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

_PAGE_SIZE = 16
_TEMPLATE_TOKENS = 128  # room for what the chat template puts around a turn
_WRITER_BATCH = 64
_POLL_S = 1.0


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
    """Add `train eagle3` to an `argparse` subparsers object."""
    train = subparsers.add_parser("train", help="train a draft head for a target")
    methods = train.add_subparsers(dest="method", required=True)
    parser = methods.add_parser(
        "eagle3",
        help="an EAGLE-3 head, on a corpus the target writes itself",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    num_cpus = os.cpu_count() or 1
    parser.add_argument("--target", default=DEFAULT_TARGET, help="target model: a Hugging Face folder or a known name")
    parser.add_argument("--out", type=Path, required=True, help="folder the head is written to")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/eagle3"), help="corpus, log, state to resume from")
    parser.add_argument("--corpus-tokens", type=int, default=1_000_000, help="answer tokens the target writes")
    parser.add_argument(
        "--writers", type=int, default=num_cpus, help="processes that write the corpus, one thread each"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=60.0, help="train for about this long")
    length.add_argument("--steps", type=int, help="train on this many batches instead")
    defaults = Eagle3TrainingConfig(num_steps=1)
    parser.add_argument("--ttt-steps", type=int, default=defaults.ttt_steps, help="steps of the training-time test")
    parser.add_argument("--draft-vocab", type=int, default=defaults.draft_vocab_size, help="ids the head can propose")
    parser.add_argument("--batch-tokens", type=int, default=defaults.tokens_per_batch, help="rows of a batch")
    parser.add_argument(
        "--lr", type=float, default=defaults.learning_rate, help="highest rate of AdamW (norms, lm_head)"
    )
    parser.add_argument("--matrix-lr", type=float, default=defaults.matrix_rate, help="highest rate of Muon (the rest)")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus, the new weights and the batch order")
    parser.add_argument("--threads", type=int, default=num_cpus, help="threads to train with")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=defaults.dtype, help="what is computed in")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Carry out `eyas train eagle3`; run again with the same arguments, it goes on where it was interrupted."""
    console = Console(stderr=True)
    target_folder = resolve_target(args.target)
    target = DecoderConfig.from_folder(target_folder)
    config = Eagle3TrainingConfig(
        num_steps=args.steps,
        max_minutes=None if args.steps else args.minutes,
        draft_vocab_size=min(args.draft_vocab, target.vocab_size),
        tokens_per_batch=args.batch_tokens,
        ttt_steps=args.ttt_steps,
        learning_rate=args.lr,
        matrix_rate=args.matrix_lr,
        dtype=args.dtype,
        seed=args.seed,
    )
    corpus_config = CorpusConfig(num_tokens=args.corpus_tokens, seed=args.seed)
    corpus_folder = args.work_dir / "corpus"
    if count_answer_tokens(shard_files(corpus_folder)) < args.corpus_tokens:
        writers = [Writer(index, args.writers) for index in range(max(1, args.writers))]
        jobs = [CorpusJob(target_folder, corpus_folder, corpus_config, _WRITER_BATCH, args.dtype, x) for x in writers]
        write_own_corpus_in_processes(jobs)
    torch.set_num_threads(args.threads)
    stop_token_id = int(AutoTokenizer.from_pretrained(target_folder).eos_token_id)
    trainer = Eagle3Trainer(config, target_folder, corpus_folder, args.work_dir, stop_token_id)
    console.print(
        f"{len(trainer.training)} conversations to train on; the draft vocabulary of {config.draft_vocab_size} ids "
        f"covers {trainer.vocabulary.coverage:.2%} of their answer tokens"
    )
    with TrainingProgress(console, trainer.step) as progress:
        validation = trainer.run(progress)
    assert validation is not None
    export_head(trainer.head, args.out)
    draw_curve(args.work_dir / "log.jsonl", args.work_dir / "training-curve.png")
    Console().print(result_table(trainer, validation))
    console.print(f"head written to {args.out}, training curve to {args.work_dir / 'training-curve.png'}")
    return 0


def result_table(trainer: Eagle3Trainer, validation: Validation) -> Table:
    """What a head can do, by drafted level, on texts it was not trained on."""
    speed = f"{validation.chain_length:.2f} tokens per verify step of a chain of {len(validation.recall)}"
    table = Table(title=f"{trainer.step} steps in {trainer.elapsed_s / 60:.0f} min; {speed}")
    table.add_column("level")
    for rank in range(1, len(validation.recall[0]) + 1):
        table.add_column(f"in top {rank}", justify="right")
    for level, shares in enumerate(validation.recall, start=1):
        table.add_row(str(level), *(f"{share:.1%}" for share in shares))
    return table
