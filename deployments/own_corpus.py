"""The target's own texts as a corpus: wires the offline engine to the corpus writer, in several processes."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.progress import progress_bar
from eyas.deployments.scheduler import TreeShape
from eyas.models.config import DecoderConfig
from eyas.training.corpus import CorpusConfig, GeneratedText, GenerationJob, UserTurnTemplate, Writer, write_corpus
from eyas.training.recording import FeatureRecorder
from eyas.training.shard import count_answer_tokens, shard_files
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.loading import EngineSpec, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

WRITER_BATCH = 64
_PAGE_SIZE = 16
_TEMPLATE_TOKENS = 128  # room for what the chat template puts around a turn
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
