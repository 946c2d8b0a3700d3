"""A head of every kind that is trained on what its target writes, exported and loaded, is accepted at every level.

Training pairs rows of a corpus, drafting pairs positions of a request; only a head that both pair alike is accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.deployments.scheduler import TreeShape
from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head
from eyas.models.llama import LlamaDecoder, load_decoder
from eyas.models.target_weights import TargetWeights
from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_head import FrozenHead
from eyas.training.candidate_trainer import CandidateTrainer
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import read_log
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job

Trained = Callable[[str], "tuple[Path, list[float]]"]

CPU = torch.device("cpu")
VOCAB, NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 61, 8, 5, 40
NUM_LEVELS, AUX_LAYERS = 3, (0, 2, 3)
LAYOUT = PoolLayout(num_pages=64, page_size=16)
NUM_STEPS = {"medusa": 700, "eagle": 350, "eagle3": 250, "mtp": 250}


@dataclass(frozen=True)
class Written:
    """A target and its greedy answers, as text and as a corpus."""

    target_folder: Path
    target: LlamaDecoder
    jobs: list[Job]
    answers: list[list[int]]
    corpus_folder: Path


@pytest.fixture(scope="module")
def written(
    tiny_models: TinyModels,
    tmp_path_factory: pytest.TempPathFactory,
    jobs: list[Job],
    new_generation: type[Generation],
    text_attention: Callable[[], Any],
) -> Written:
    folder = tiny_models.target(layer_gain=0.3)
    target = load_decoder(folder, torch.float32, CPU)
    generator = torch.Generator().manual_seed(1)
    job = type(jobs[0])
    asked = [
        job(torch.randint(VOCAB, (PROMPT_TOKENS,), generator=generator).tolist(), SamplingParams(), ANSWER_TOKENS)
        for _ in range(NUM_PROMPTS)
    ]
    generation = new_generation(LocalWorkers(TargetRunner(target, LAYOUT, ()), None), TreeShape())
    for each in asked:
        generation.submit(each)
    answers = generation.run()
    texts = [each.prompt_ids + answer for each, answer in zip(asked, answers, strict=True)]
    texts.append([(texts[0][0] + 1) % VOCAB, *texts[0][1:]])  # the last conversation is for validation
    states = []
    for text in texts:
        with torch.inference_mode():
            tokens = torch.tensor(text)
            capture = (*AUX_LAYERS, target.config.num_layers)
            features = target(tokens, torch.arange(len(text)), text_attention(), capture).features
        assert features is not None
        states.append(features.clone().to(torch.bfloat16))
    corpus_folder = tmp_path_factory.mktemp("corpus")
    save_file(
        {
            "token_ids": torch.tensor(sum(texts, [])),
            "features": torch.cat(states),
            "lengths": torch.tensor([len(text) for text in texts]),
            "prompt_lengths": torch.full((len(texts),), PROMPT_TOKENS),
        },
        corpus_folder / "shard-00000.safetensors",
    )
    return Written(folder, target, asked, answers, corpus_folder)


def no_stop(written: Written) -> int:
    """A token with which no answer ends."""
    return VOCAB - 1 if all(answer[-1] != VOCAB - 1 for answer in written.answers) else 0


@pytest.fixture(scope="module")
def trained(written: Written, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[float]]]:
    """Trains a head of a kind, once: its folder, and its accuracy by level."""
    return functools.cache(lambda kind: train(written, kind, tmp_path_factory.mktemp(kind)))


def train(written: Written, kind: str, folder: Path) -> tuple[Path, list[float]]:
    config = TrainingConfig(
        kind,
        num_steps=NUM_STEPS[kind],
        draft_vocab_size=VOCAB,
        tokens_per_batch=1000,
        num_levels=NUM_LEVELS,
        has_own_projection=kind == "medusa",
        loss_rows="answers",  # the prompts are noise, which a head so small has no room for
        learning_rate=5e-3,
        matrix_rate=5e-3,
        matrix_decay=0.0,
        warmup_steps=10,
        validation_share=0.1,
        validate_every=NUM_STEPS[kind],  # one text is too little to choose the best head by: the last one is exported
        dtype="float32",
    )
    trainer = HeadTrainer(
        config, written.target_folder, [written.corpus_folder], folder / "work", no_stop(written), aux_layers=AUX_LAYERS
    )
    trainer.run(Silent())
    trainer.export(folder / "head")
    return folder / "head", read_log(folder / "work" / "log.jsonl")[-1].accuracy


def tokens_per_step(written: Written, head_folder: Path, new_generation: type[Generation]) -> float:
    """Of drafted chains; the text is checked to be the target's."""
    weights = TargetWeights(written.target_folder, DecoderConfig.from_folder(written.target_folder))
    head = load_head(head_folder, weights, torch.float32, CPU)
    workers = LocalWorkers(TargetRunner(written.target, LAYOUT, head.capture), DraftRunner(head, LAYOUT))
    generation = new_generation(workers, TreeShape(NUM_LEVELS + 1, NUM_LEVELS, 1))
    for job in written.jobs:
        generation.submit(job)
    assert generation.run() == written.answers
    lengths = [len(run.tokens) for run in generation.decode_runs]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("kind", sorted(NUM_STEPS))
def test_a_trained_head_is_accepted(
    written: Written, trained: Trained, new_generation: type[Generation], kind: str
) -> None:
    """Catches a level trained against the distribution of another token, and a feature, token or position that training
    and drafting pair differently."""
    folder, accuracy = trained(kind)
    assert min(accuracy) > 0.9, accuracy
    assert tokens_per_step(written, folder, new_generation) > 0.9 * (NUM_LEVELS + 1)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trained_factors_lose_few_tokens(
    written: Written, trained: Trained, new_generation: type[Generation], tmp_path: Path, kind: str
) -> None:
    """Catches factors trained on other states than the drafter asks them about, at the first level or later ones.

    Those of the singular values alone, of so low a rank, find too little.
    """
    folder, _ = trained(kind)
    config = CandidateConfig(
        head=str(folder),
        rank=3,
        num_candidates=4,
        num_steps=100,
        tokens_per_batch=1000,
        num_levels=NUM_LEVELS,
        learning_rate=2e-2,
        warmup_steps=10,
        validation_share=0.1,
        dtype="float32",
    )
    head = FrozenHead(folder, written.target_folder, config.compute_dtype, AUX_LAYERS)
    trainer = CandidateTrainer(config, head, [written.corpus_folder], tmp_path / "candidates", no_stop(written))
    trainer.export(tmp_path / "svd")
    trainer.run(Silent())
    trainer.export(tmp_path / "trained")
    places = (folder, tmp_path / "svd", tmp_path / "trained")
    full, before, after = (tokens_per_step(written, place, new_generation) for place in places)
    assert before < 0.8 * full
    assert after > 0.8 * full


class Silent:
    """An `Observer` that is not interested."""

    def on_step(self, record: Any, num_steps: int | None) -> None:
        pass

    def on_validation(self, step: int, validation: Any) -> None:
        pass
