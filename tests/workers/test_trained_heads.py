"""A head of every kind that is trained on what its target writes, exported and loaded, is accepted at every level.

Training pairs rows of a corpus, drafting pairs positions of a request; only a head that both pair alike is accepted.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("kind", sorted(NUM_STEPS))
def test_a_trained_head_is_accepted(
    written: Written, new_generation: type[Generation], tmp_path: Path, kind: str
) -> None:
    """Catches a level trained against the distribution of another token, and a feature, token or position that training
    and drafting pair differently."""
    config = TrainingConfig(
        kind,
        num_steps=NUM_STEPS[kind],
        draft_vocab_size=VOCAB,
        tokens_per_batch=1000,
        num_levels=NUM_LEVELS,
        has_own_projection=kind == "medusa",
        learning_rate=5e-3,
        matrix_rate=5e-3,
        matrix_decay=0.0,
        warmup_steps=10,
        validation_share=0.1,
        validate_every=NUM_STEPS[kind],  # one text is too little to choose the best head by: the last one is exported
        dtype="float32",
    )
    no_stop = VOCAB - 1 if all(answer[-1] != VOCAB - 1 for answer in written.answers) else 0
    trainer = HeadTrainer(
        config, written.target_folder, [written.corpus_folder], tmp_path / "work", no_stop, aux_layers=AUX_LAYERS
    )
    trainer.run(Silent())
    accuracy = read_log(tmp_path / "work" / "log.jsonl")[-1].accuracy
    assert min(accuracy) > 0.9, accuracy
    trainer.export(tmp_path / "head")
    weights = TargetWeights(written.target_folder, DecoderConfig.from_folder(written.target_folder))
    head = load_head(tmp_path / "head", weights, torch.float32, CPU)
    workers = LocalWorkers(TargetRunner(written.target, LAYOUT, head.capture), DraftRunner(head, LAYOUT))
    generation = new_generation(workers, TreeShape(NUM_LEVELS + 1, NUM_LEVELS, 1))
    for job in written.jobs:
        generation.submit(job)
    assert generation.run() == written.answers
    lengths = [len(run.tokens) for run in generation.decode_runs]
    assert sum(lengths) / len(lengths) > 0.9 * (NUM_LEVELS + 1)


class Silent:
    """An `Observer` that is not interested."""

    def on_step(self, record: Any, num_steps: int | None) -> None:
        pass

    def on_validation(self, step: int, validation: Any) -> None:
        pass
