"""Training on another device than the CPU, played by one that is not there; see pretended_device.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.training.batch import Batch
from eyas.training.method import TrainingMethod
from eyas.training.methods import KINDS
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


def losses_of(work: Path) -> list[float]:
    return [record.loss for record in read_log(work / "log.jsonl")]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in KINDS), ("eagle3", {"objective": "hard"}), ("eagle3", {"objective": "tree"}),
     ("medusa", {"loss_rows": "all", "has_own_projection": True})],
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
