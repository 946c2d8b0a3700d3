"""Training on another device than the CPU, played by one that is not there; see pretended_device.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.training.batch import Batch
from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_head import FrozenHead
from eyas.training.candidate_trainer import CandidateTrainer
from eyas.training.eagle3_method import Eagle3Method
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.method import TrainingMethod
from eyas.training.methods import KINDS
from eyas.training.prior_samples import FeatureReader, PathSamples, SampleCollector
from eyas.training.ranks import ALONE, Ranks
from eyas.training.shard import Shard, save_shard
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import StepRecord, read_log
from eyas.training.validation import Validation
from tests.training.pretended_device import PRETENDED, PretendedDevice, PretendedTensor

STOP = 2
CONFIG = TrainingConfig(
    kind="eagle3", num_steps=4, draft_vocab_size=32, loss_vocab_size=24, num_sampled=8, tokens_per_batch=26,
    validation_share=0.2, dtype="float32",
)  # fmt: skip


class Silent:
    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        pass

    def on_validation(self, step: int, validation: Validation) -> None:
        pass


@pytest.fixture
def make_trainer(target_folder: Path, shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    adam = sys.modules[torch.optim.AdamW.__bases__[0].__module__]
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda weight: None)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    save_shard(shard, corpus / "shard-00000.safetensors")

    def make(work: str, ranks: Ranks, **changes: Any) -> HeadTrainer:
        config = dataclasses.replace(CONFIG, **changes)
        return HeadTrainer(config, target_folder, [corpus], tmp_path / work, STOP, (2, 3, 5), ranks=ranks)

    return make


@pytest.fixture
def make_candidates(make_trainer: Any, target_folder: Path, target: DecoderConfig, tmp_path: Path) -> Any:
    """Makes the trainer of an EAGLE-3 head's candidate projection on a device."""
    method = Eagle3Method((2, 3, 5))
    head = method.new_head(NewWeights(target_folder, target, torch.float32, 0), torch.arange(24, 64), num_levels=3)
    method.export(head, tmp_path / "head")
    config = CandidateConfig(
        head=str(tmp_path / "head"), rank=4, num_candidates=6, num_steps=4, tokens_per_batch=26, validation_share=0.2,
        dtype="float32",
    )  # fmt: skip

    def make(work: str, device: torch.device) -> CandidateTrainer:
        frozen = FrozenHead(tmp_path / "head", target_folder, torch.float32, (2, 3, 5), device)
        return CandidateTrainer(config, frozen, [tmp_path / "corpus"], tmp_path / work, STOP)

    return make


def losses_of(work: Path) -> list[float]:
    return [record.loss for record in read_log(work / "log.jsonl")]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in KINDS if kind != "eagle"), ("eagle3", {"objective": "hard"}),
     ("eagle3", {"objective": "tree"}), ("medusa", {"loss_rows": "all", "has_own_projection": True}),
     # At the rate of the others its states run away, and take differences of rounding with them.
     ("eagle", {"matrix_rate": 3e-3})],
)  # fmt: skip
def test_training_stays_on_its_device(make_trainer: Any, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Catches a tensor made on the CPU where head or batch lie elsewhere, which only a GPU would show, results that
    differ between devices, and a state that can be resumed on the device alone it was written on."""
    with PretendedDevice():
        trainer = make_trainer("pretended", Ranks(device=PRETENDED), kind=kind, **changes)
        assert all(isinstance(weight, PretendedTensor) for weight in trainer.head.parameters())
        trainer.run(Silent(), stop_after=2)
        trainer.save()
        trainer.export(tmp_path / "head")
    resumed = make_trainer("pretended", ALONE, kind=kind, **changes)
    assert not any(isinstance(weight, PretendedTensor) for weight in resumed.head.parameters())
    resumed.run(Silent())
    make_trainer("whole", ALONE, kind=kind, **changes).run(Silent())
    assert losses_of(tmp_path / "pretended") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-3)


def test_a_state_of_the_cpu_resumes_elsewhere(make_trainer: Any, tmp_path: Path) -> None:
    """Catches optimiser states left behind on the CPU."""
    first = make_trainer("work", ALONE)
    first.run(Silent(), stop_after=2)
    first.save()
    with PretendedDevice():
        make_trainer("work", Ranks(device=PRETENDED)).run(Silent())
    make_trainer("whole", ALONE).run(Silent())
    assert losses_of(tmp_path / "work") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-3)


def test_candidates_stay_on_their_device(make_candidates: Any, tmp_path: Path) -> None:
    """Catches batches left on the CPU, factors made there, and a state that resumes on one device alone."""
    cpu = torch.device("cpu")
    whole = make_candidates("whole", cpu).run(Silent())
    with PretendedDevice():
        trainer = make_candidates("work", PRETENDED)
        assert all(isinstance(weight, PretendedTensor) for weight in trainer.factors.parameters())
        trainer.run(Silent(), stop_after=2)
        trainer.loop.save(trainer)
        trainer.export(tmp_path / "out")
    resumed = make_candidates("work", cpu).run(Silent())
    assert resumed.divergence == pytest.approx(whole.divergence, rel=1e-3)
    assert losses_of(tmp_path / "work") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-3)
    with PretendedDevice():
        again = make_candidates("work", PRETENDED).run(Silent())
    assert again.divergence == pytest.approx(whole.divergence, rel=1e-3)


def test_paths_are_collected_on_the_device_of_the_head(
    make_trainer: Any, target_folder: Path, target: DecoderConfig
) -> None:
    """Catches rows or marks left on the CPU where a prior is fitted, which only a GPU would show."""

    def collected(ranks: Ranks) -> tuple[PathSamples, PathSamples]:
        trainer = make_trainer("work", ranks)
        output = TargetOutput.load(target_folder, target, torch.float32, ranks.device)
        reader = FeatureReader((2, 3, 5), target.final_index, output)
        batches = [trainer.corpus.batch(trainer.corpus.conversations)]
        return SampleCollector(trainer.head, reader, 3, 4, 0).collect(batches)

    with PretendedDevice():
        found = collected(Ranks(device=PRETENDED))
    for samples, expected in zip(found, collected(ALONE), strict=True):
        assert not isinstance(samples.log_probs, PretendedTensor)
        assert torch.equal(samples.is_counted, expected.is_counted)
        assert torch.equal(samples.accepted, expected.accepted)
        torch.testing.assert_close(samples.log_probs, expected.log_probs)


def test_the_pretended_device_sees_a_stranger(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a device that lets anything pass: rows made on the CPU must be noticed."""

    def rows(self: Batch, step: int) -> Tensor:
        return real(self, step).cpu()

    real = Batch.rows
    with PretendedDevice():
        trainer = make_trainer("work", Ranks(device=PRETENDED))
        monkeypatch.setattr(Batch, "rows", rows)
        with pytest.raises(RuntimeError, match="tensors on two devices"):
            trainer.run(Silent())


def test_methods_are_all_tried() -> None:
    """Catches a kind of head that these tests leave out."""
    assert len(KINDS) == len(TrainingMethod.__subclasses__())
