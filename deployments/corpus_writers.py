"""Processes in which the target writes a corpus: each wires an offline engine to the corpus writer."""

from __future__ import annotations

import multiprocessing
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.progress import progress_bar
from eyas.deployments.scheduler import TreeShape
from eyas.deployments.tokenizer import Tokenizer
from eyas.training.child_process import end_with_parent
from eyas.training.corpus import InventedTurns, Questions, UserTurnTemplate, Writer, write_corpus
from eyas.training.generation import CorpusConfig, GeneratedText, GenerationJob
from eyas.training.given_prompts import GivenPrompts
from eyas.training.openers import OPENERS
from eyas.training.recording import FeatureRecorder
from eyas.training.shard import count_answer_tokens, shard_files
from eyas.training.states import recorded_layers
from eyas.workers.loading import EngineSpec, load_target_model
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

TEMPLATE_TOKENS = 128  # room for what the chat template puts around a turn
_WRITER_BATCH = 64
_POOL_TOKENS = 32_768  # a writer's cache; nothing may be preempted, because states are recorded once
_PAGE_SIZE = 16
_POLL_S = 1.0
_FAILED = (
    "a corpus writer ended with exit code {}, see above; complete shards are kept, start again with the same arguments "
    "to go on"
)


@dataclass(frozen=True, slots=True)
class CorpusJob:
    """What one corpus-writing process needs; picklable.

    Args:
        prompts: what the target answers; None lets it invent user turns.
        records_states: whether the shards hold the target's states.
    """

    target_folder: Path
    folder: Path
    config: CorpusConfig
    dtype: str
    writer: Writer
    prompts: list[list[int]] | None = None
    records_states: bool = True
    device: str = "cpu"


def write_own_corpus(job: CorpusJob) -> None:
    """Run one corpus writer in this process, on one thread: the writers share the cores without waiting on another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key press reaches all processes; the first one ends the others
    end_with_parent()
    torch.set_num_threads(1)
    config = job.config
    longest = _longest_prompt(job.prompts, config) + config.max_answer_tokens
    batch_size = max(1, min(_WRITER_BATCH, _POOL_TOKENS // longest))
    num_pages = batch_size * -(-longest // _PAGE_SIZE)
    spec = EngineSpec(str(job.target_folder), None, job.dtype, job.device, num_pages, _PAGE_SIZE, num_threads=1)
    model = load_target_model(spec)
    capture = recorded_layers(model.config) if job.records_states else ()
    target = TargetRunner(model, spec.layout, capture, spec.target_backends())
    recorder = FeatureRecorder() if job.records_states else None
    engine = OfflineEngine(
        LocalWorkers(target, recorder), PageAllocator(num_pages, _PAGE_SIZE), TreeShape(), batch_size
    )
    tokenizer = Tokenizer.from_folder(job.target_folder)
    stop = tokenizer.eos_token_ids

    def generate(jobs: list[GenerationJob]) -> list[GeneratedText]:
        outputs = engine.generate(
            [
                OfflineRequest(
                    text.prompt_ids, SamplingParams(text.temperature, text.top_p, text.seed), text.max_tokens, stop
                )
                for text in jobs
            ]
        )
        return [GeneratedText(output.request_id, output.token_ids) for output in outputs]

    questions: Questions
    if job.prompts is None:
        template = UserTurnTemplate.of(tokenizer.raw)
        openers = [tokenizer.raw.encode(opener, add_special_tokens=False) for opener in OPENERS]
        questions = InventedTurns(template, config, generate, recorder, stop, openers)
    else:
        questions = GivenPrompts(job.prompts, config)
    write_corpus(job.folder, config.num_tokens, questions, generate, recorder, job.writer)


def write_in_processes(jobs: list[CorpusJob]) -> None:
    """Run one process per job until the corpus is complete, with a bar of its answer tokens.

    Raises:
        ChildProcessError: if a writer fails; the others are ended, and complete shards stay.
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
                    raise ChildProcessError(_FAILED.format(failed[0]))
                progress.update(task, completed=min(num_tokens, count_answer_tokens(shard_files(folder))))
                time.sleep(_POLL_S)
        finally:
            for writer in writers:
                if writer.is_alive():
                    writer.terminate()
                    writer.join()
    failed = [writer.exitcode for writer in writers if writer.exitcode]
    if failed:
        raise ChildProcessError(_FAILED.format(failed[0]))


def _longest_prompt(prompts: list[list[int]] | None, config: CorpusConfig) -> int:
    return config.max_user_tokens + TEMPLATE_TOKENS if prompts is None else max(len(prompt) for prompt in prompts)
