"""Workers of random models in this process, driven by a scheduler as a router drives them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import ScheduledRequest, Scheduler, TreeShape
from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.llama import LlamaDecoder, load_decoder
from eyas.models.target_weights import TargetWeights
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.messages import AcceptedRun, NewRequest, PrefillChunk, StepPlan, StepResult
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels

CPU = torch.device("cpu")


class GuessingHead(Eagle3Head):
    """A head that is accepted often, as a trained one is.

    It guesses from the newest token alone, which the target of these tests nearly follows; the random layer below
    adds errors of its own, so that the right token is often not the first candidate. States carry the token.
    """

    guesses: Tensor  # the target's logits after each token by itself, [V, V]

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        states = super().step(states[:, : self.config.hidden_size], token_ids, positions, attention)
        return torch.cat([states, F.one_hot(token_ids, self.guesses.shape[0]).to(states.dtype)], dim=-1)

    def logits(self, states: Tensor) -> Tensor:
        own = super().logits(states[:, : self.config.hidden_size])
        guessed = states[:, self.config.hidden_size :] @ self.guesses[:, self.candidate_ids]
        return guessed + 0.2 * own


@dataclass(frozen=True)
class Recomputed:
    """Caches and features of a text that was prefilled in one piece, alone, on pages of its own."""

    target_pool: KVPool
    draft_pool: KVPool
    features: Tensor


@dataclass(frozen=True)
class Models:
    """One target with heads that read it; shared by all tests, nothing in it is ever written."""

    target_folder: Path
    head_folder: Path
    target: LlamaDecoder
    random_head: Eagle3Head
    guessing_head: GuessingHead

    def workers(self, layout: PoolLayout, head: Eagle3Head | None) -> LocalWorkers:
        return LocalWorkers(self.target_runner(layout), None if head is None else DraftRunner(head, layout))

    def target_runner(self, layout: PoolLayout) -> TargetRunner:
        return TargetRunner(self.target, layout, self.random_head.config.aux_layers)

    def recompute(self, token_ids: list[int], root: int) -> Recomputed:
        """For the committed `token_ids`, whose next token is `root`."""
        layout = PoolLayout(num_pages=len(token_ids), page_size=1)
        request = NewRequest(0, token_ids, SamplingParams())
        plan = StepPlan(1, [request], {0: list(range(len(token_ids)))}, prefill=[PrefillChunk(0, len(token_ids))])
        target, drafter = self.target_runner(layout), DraftRunner(self.random_head, layout)
        features = target.step(plan, {}).features
        assert features is not None
        drafter.update_requests(plan)
        drafter.extend([AcceptedRun(0, 0, len(token_ids), [root])], features)
        return Recomputed(target.pool, drafter.pool, features)


@dataclass(frozen=True)
class Job:
    """A request of these tests."""

    prompt_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 16


@dataclass
class Running:
    """What is known of a request from the outside.

    Args:
        emitted: tokens handed to the request.
        text: prompt and every token the workers have chosen, also past the request's end.
        num_committed: positions the workers have committed; the root is `text[num_committed]` after the prompt.
    """

    job: Job
    text: list[int]
    pages: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    num_committed: int = 0
    error: str | None = None
    is_over: bool = False

    def push(self, token_ids: list[int]) -> bool:
        self.emitted += token_ids
        self.is_over = len(self.emitted) >= self.job.max_tokens
        return self.is_over

    def fail(self, message: str) -> None:
        self.error = message
        self.is_over = True


class Generation:
    """Answers jobs step by step.

    Args:
        is_ahead: send each plan before the last one's result is applied, as a pipelined router does.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        shape: TreeShape,
        max_batch_size: int = 8,
        max_prefill_tokens: int = 512,
        is_ahead: bool = False,
    ) -> None:
        self.workers = workers
        self.layout = workers.target.layout
        self.requests: dict[int, Running] = {}
        self.decode_runs: list[AcceptedRun] = []
        self._is_ahead = is_ahead
        self._scheduler = Scheduler(
            PageAllocator(self.layout.num_pages, self.layout.page_size), shape, max_batch_size, max_prefill_tokens
        )
        self._unapplied: list[StepResult] = []

    def submit(self, job: Job) -> Running:
        request_id = len(self.requests)
        running = self.requests[request_id] = Running(job, list(job.prompt_ids))
        self._scheduler.submit(ScheduledRequest(request_id, job.prompt_ids, job.sampling, job.max_tokens, running))
        return running

    def cancel(self, running: Running) -> None:
        running.is_over = True
        self._scheduler.cancel(list(self.requests.values()).index(running))

    def steps(self) -> Iterator[StepPlan]:
        """Run to the end, yielding after each step; jobs may be submitted in between."""
        while self._scheduler.has_work or self._unapplied:
            plan = self._scheduler.plan()
            if plan is not None:
                for request_id, pages in plan.new_pages.items():
                    self.requests[request_id].pages += pages
                self._unapplied.append(self._run(plan))
            if plan is None or len(self._unapplied) > self._is_ahead:
                self._scheduler.apply(self._unapplied.pop(0))
            if plan is not None:
                yield plan

    def run(self) -> list[list[int]]:
        """Emitted tokens of all jobs, cut at their limits."""
        for _ in self.steps():
            pass
        return [running.emitted[: running.job.max_tokens] for running in self.requests.values()]

    def _run(self, plan: StepPlan) -> StepResult:
        result = self.workers.step(plan)
        for run in result.runs:
            running = self.requests[run.request_id]
            running.text += run.tokens
            running.num_committed = run.start + run.num_committed
        self.decode_runs += result.runs[: len(plan.decode)]
        return result


@pytest.fixture(scope="session")
def models(tiny_models: TinyModels) -> Models:
    target_folder = tiny_models.target(layer_gain=0.3)  # enough for a wrong cache to change the text
    head_folder = tiny_models.head(target_folder, draft_vocab_size=55)
    config = DecoderConfig.from_folder(target_folder)
    target = load_decoder(target_folder, torch.float32, CPU)
    weights = TargetWeights(target_folder, config)
    random_head = load_head(head_folder, weights, torch.float32, CPU)
    guessing_head = load_head(head_folder, weights, torch.float32, CPU)
    assert isinstance(random_head, Eagle3Head)
    guessing_head.__class__ = GuessingHead
    assert isinstance(guessing_head, GuessingHead)
    guessing_head.guesses = logits_after_each_token(target)
    guessing_head.state_size += config.vocab_size
    return Models(target_folder, head_folder, target, random_head, guessing_head)


def logits_after_each_token(target: LlamaDecoder) -> Tensor:
    """Logits of every one-token text, `[V, V]`."""
    config = target.config
    group = config.num_heads // config.num_kv_heads

    def attend_self(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.repeat_interleave(group, dim=1)

    with torch.inference_mode():
        tokens = torch.arange(config.vocab_size)
        return target.logits(target(tokens, torch.zeros_like(tokens), attend_self).hidden)


@pytest.fixture(scope="session")
def jobs() -> list[Job]:
    """Greedy, warm and hot requests; prompts of 1 to 40 tokens."""
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, seed=11),
        SamplingParams(temperature=1.0, seed=12),
        SamplingParams(temperature=1.0, top_p=0.8, seed=2**63 - 1),
    ]
    rng = random.Random(0)
    lengths = [1, 2, 7, 40, 16, 3, 25, 9, 12, 31, 5, 17]
    return [
        Job([rng.randrange(61) for _ in range(length)], samplings[index % 4], max_tokens=rng.randint(8, 24))
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="session")
def plain_texts(models: Models, jobs: list[Job]) -> list[list[int]]:
    """What the target alone answers to each job, one at a time."""
    return [plain_text(models, job) for job in jobs]


def plain_text(models: Models, job: Job) -> list[int]:
    generation = Generation(models.workers(PoolLayout(num_pages=2, page_size=64), None), TreeShape())
    generation.submit(job)
    return generation.run()[0]


@pytest.fixture(scope="session")
def new_generation() -> type[Generation]:
    return Generation
