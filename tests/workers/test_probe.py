from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.models.attention import Attention
from eyas.models.head import Candidates, DraftHead, Ranker
from eyas.models.llama import load_decoder
from eyas.models.parallel import TensorParallel
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.probe import ProbeReport, probe_head, write_probe_texts
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.workers.conftest import Job, Models

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
LAYOUT = PoolLayout(num_pages=16, page_size=8)
EMBEDDING, FIRST_LAYER, SECOND_LAYER = (0,), (1,), (2,)


class EmbeddingReader(DraftHead):
    """Guesses well from the newest token as long as its features are rows of the target's embedding, else badly."""

    cache = None
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.embedding = models.target.embedding
        self.guesses = models.guessing_head.guesses
        self.candidate_ids = torch.arange(self.guesses.shape[0])

    def extend(self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        is_embedding = (features[:, None] == self.embedding).all(dim=2).any(dim=1, keepdim=True)
        return torch.where(is_embedding, self.guesses[token_ids], -self.guesses[token_ids])

    def step(self, states: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        raise NotImplementedError

    def candidates(self, states: Tensor, levels: range, ranker: Ranker) -> Candidates:
        return ranker.rank(states, self.candidate_ids)


def probe(models: Models, captures: list[tuple[int, ...]]) -> ProbeReport:
    runner = TargetRunner(models.target, LAYOUT, captures[0])
    report = probe_head(runner, EmbeddingReader(models), captures, PROMPTS)
    assert runner.capture == captures[0]
    assert report is not None
    assert report.num_tokens == 32 * len(PROMPTS) - 1  # nothing precedes the pair of a lone prompt token's successor
    return report


def test_the_reading_that_works_is_chosen_and_told(models: Models) -> None:
    """Catches features captured one layer off, the field's commonest silent failure."""
    report = probe(models, [FIRST_LAYER, EMBEDDING, SECOND_LAYER])
    assert report.capture == EMBEDDING
    assert report.agreement[1] > 0.5 > report.agreement[0]
    (warning,) = report.warnings()
    assert r"[1]" in warning
    assert "[0] gives" in warning
    assert "--aux-layers" in warning


def test_files_that_are_right_are_trusted(models: Models) -> None:
    """Catches a probe that prefers another reading for a difference that is noise, or warns of a good head."""
    report = probe(models, [EMBEDDING, FIRST_LAYER])
    assert report.capture == EMBEDDING
    assert report.warnings() == []
    assert ProbeReport([(1,), (2,)], [0.50, 0.54], 256).capture == (1,)


def test_a_head_for_another_target_is_told(models: Models) -> None:
    """Catches a server that only is slow, and nobody knows why."""
    (warning,) = probe(models, [FIRST_LAYER]).warnings()
    assert "another target" in warning


def test_agreement_is_that_of_the_first_drafted_token(models: Models) -> None:
    """Catches pairs or expected tokens shifted by one position."""
    runner = TargetRunner(models.target, LAYOUT, EMBEDDING)
    texts = write_probe_texts(runner, PROMPTS, 32)
    right = [
        int(models.guessing_head.guesses[newest].argmax()) == following
        for text in texts
        for newest, following in zip(
            text.token_ids[max(text.num_prompt - 1, 1) : -1], text.token_ids[max(text.num_prompt, 2) :], strict=True
        )
    ]
    assert probe(models, [EMBEDDING]).agreement[0] == pytest.approx(sum(right) / len(right))


def test_texts_are_the_targets_own_and_leave_nothing_behind(
    models: Models, jobs: list[Job], new_generation: Callable[..., Any]
) -> None:
    """Catches a probe that disturbs the first requests, or measures on texts the target would not write."""
    workers = models.workers(LAYOUT, None)
    (text, *_) = write_probe_texts(workers.target, PROMPTS, 20)
    assert workers.target.num_granted_pages == 0
    generation = new_generation(workers, _plain_shape())
    generation.submit(type(jobs[0])(PROMPTS[0], max_tokens=20))
    assert generation.run() == [text.token_ids[len(PROMPTS[0]) :]]
    assert text.features.shape[0] == len(text.token_ids) - 1


def test_a_pool_too_small_for_a_text_is_no_error(models: Models) -> None:
    """Catches a small server that cannot start for want of room to probe."""
    runner = TargetRunner(models.target, PoolLayout(1, 8), EMBEDDING)
    assert probe_head(runner, EmbeddingReader(models), [EMBEDDING], PROMPTS) is None


def test_ranks_write_the_same_texts(
    models: Models, run_ranks: Callable[[int, Callable[[TensorParallel], Any]], list[Any]]
) -> None:
    """Catches a rank that waits for ever because only the first one runs the probe's steps."""

    def work(parallel: TensorParallel) -> ProbeReport | None:
        target = load_decoder(models.target_folder, torch.float32, torch.device("cpu"), parallel)
        runner = TargetRunner(target, LAYOUT, EMBEDDING)
        return probe_head(runner, EmbeddingReader(models) if parallel.rank == 0 else None, [EMBEDDING], PROMPTS)

    first, second = run_ranks(2, work)
    assert second is None
    assert first == probe(models, [EMBEDDING])


def _plain_shape() -> Any:
    from eyas.deployments.scheduler import TreeShape

    return TreeShape()
