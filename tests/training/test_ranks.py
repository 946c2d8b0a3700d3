"""Two processes over Gloo train a tiny head; each start costs seconds, so one run serves several tests."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.training.dataset import training_order
from eyas.training.rank_processes import run_in_processes
from eyas.training.ranks import ALONE, Ranks
from eyas.training.shard import Shard, save_shard
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import StepRecord, read_log
from eyas.training.validation import Validation

STOP = 2
NUM_STEPS, KILL_AFTER = 8, 5
CONFIG = TrainingConfig(
    kind="eagle3",
    num_steps=NUM_STEPS,
    draft_vocab_size=32,
    num_sampled=8,
    tokens_per_batch=26,
    learning_rate=3e-3,
    warmup_steps=2,
    validation_share=0.2,
    checkpoint_minutes=60.0,
    matrix_rate=0.0,
    dtype="float32",
)


class Silent:
    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        pass

    def on_validation(self, step: int, validation: Validation) -> None:
        pass


@dataclass(frozen=True)
class Scene:
    """What a rank needs to train; picklable."""

    target: Path
    corpus: Path
    work: Path
    config: TrainingConfig = CONFIG

    def trainer(self, ranks: Ranks) -> HeadTrainer:
        return HeadTrainer(self.config, self.target, [self.corpus], self.work, STOP, (2, 3, 5), ranks=ranks)

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in read_log(self.work / "log.jsonl")]


@pytest.fixture(scope="module")
def scene(target_folder: Path, shard: Shard, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    corpus = tmp_path_factory.mktemp("corpus")
    save_shard(shard, corpus / "shard-00000.safetensors")
    return Scene(target_folder, corpus, tmp_path_factory.mktemp("work") / "whole")


def train(scene: Scene, ranks: Ranks) -> Validation | None:
    """Train to the end; every rank leaves its weights in a file of its own."""
    trainer = scene.trainer(ranks)
    validation = trainer.run(Silent())
    torch.save(trained(trainer), scene.work / f"weights-{ranks.rank}.pt")
    return validation


def trained(trainer: HeadTrainer) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in trainer.head.named_parameters() if weight.requires_grad}


def train_and_exchange(scene: Scene, ranks: Ranks) -> None:
    train(scene, ranks)
    exchange(scene, ranks)
    raise ValueError(f"rank {ranks.rank} refuses")


@pytest.fixture(scope="module")
def whole(scene: Scene) -> Scene:
    """Two ranks that trained to the end and exchanged this and that; then they refused to go on."""
    with pytest.raises(ValueError, match="^rank [01] refuses$"):
        run_in_processes(partial(train_and_exchange, scene), 2, "cpu", 4)
    return scene


def test_both_ranks_hold_the_same_weights(whole: Scene) -> None:
    """Catches gradients that are not exchanged, and rates or clipping that differ between ranks."""
    first, second = (torch.load(whole.work / f"weights-{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_ranks_step_like_one_process_that_averages_by_hand(whole: Scene, tmp_path: Path) -> None:
    """Catches a plain mean of gradients, ranks that train on one another's batch, and losses of one rank alone."""
    trainer = dataclasses.replace(whole, work=tmp_path).trainer(ALONE)
    objective, weights = trainer._objective, [w for w in trainer.head.parameters() if w.requires_grad]
    order = training_order(trainer.training, CONFIG.tokens_per_batch, CONFIG.seed)
    losses, unequal = [], False
    for step in range(NUM_STEPS):
        parts = []
        for conversations in itertools.islice(order, 2):
            loss, _ = objective.compute(trainer.corpus.batch(conversations))
            parts.append((objective.num_kept, loss.item(), torch.autograd.grad(loss, weights)))
        total = sum(count for count, _, _ in parts)
        unequal |= parts[0][0] != parts[1][0]
        losses.append(sum(count * loss for count, loss, _ in parts) / total)
        for index, weight in enumerate(weights):
            weight.grad = torch.stack([count / total * gradients[index] for count, _, gradients in parts]).sum(dim=0)
        trainer._optimizer.set_rate(CONFIG.rate_share(step, NUM_STEPS))
        trainer._optimizer.step(CONFIG.max_grad_norm)
    assert unequal, "batches of one size cannot tell a weighted mean from a plain one"
    assert whole.losses == pytest.approx(losses, rel=1e-5)
    expected = torch.load(whole.work / "weights-0.pt")
    for name, weight in trained(trainer).items():
        assert (weight - expected[name]).abs().max() < 1e-6, name


def test_weights_by_kept_rows_give_the_gradient_of_the_joint_batch(whole: Scene, tmp_path: Path) -> None:
    """Catches weights by all rows, prompts included: with one level and no sampled ids the definition is exact."""
    config = dataclasses.replace(CONFIG, num_levels=1, num_sampled=0)
    trainer = Scene(whole.target, whole.corpus, tmp_path, config).trainer(ALONE)
    objective, weights = trainer._objective, [w for w in trainer.head.parameters() if w.requires_grad]
    groups = [trainer.training[:1], trainer.training[1:]]
    parts = []
    for group in [*groups, trainer.training]:
        loss, _ = objective.compute(trainer.corpus.batch(group))
        parts.append((objective.num_kept, torch.autograd.grad(loss, weights)))
    (first, first_gradients), (second, second_gradients), (total, joint_gradients) = parts
    assert first + second == total
    for a, b, joint in zip(first_gradients, second_gradients, joint_gradients, strict=True):
        torch.testing.assert_close((first * a + second * b) / total, joint, rtol=1e-4, atol=1e-6)


def test_another_number_of_ranks_does_not_resume(whole: Scene) -> None:
    """Catches a resumed run whose batches are no longer those of the run it goes on with."""
    with pytest.raises(ValueError, match="written by 2 ranks, now there are 1"):
        whole.trainer(ALONE)


def die(scene: Scene, ranks: Ranks) -> None:
    """Train some steps; then rank 1 is killed while rank 0 waits for nothing that concerns it."""
    (scene.work.parent / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    scene.trainer(ranks).run(Silent(), stop_after=KILL_AFTER)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10_000)


def test_a_killed_rank_ends_the_others_and_the_run_resumes(whole: Scene, tmp_path: Path) -> None:
    """Catches ranks that outlive a dead one, an error that does not name it, and a resumed run in another order."""
    killed = dataclasses.replace(
        whole, work=tmp_path / "work", config=dataclasses.replace(CONFIG, checkpoint_minutes=1e-9)
    )
    with pytest.raises(ChildProcessError, match="rank 1 of 2 was killed by SIGKILL"):
        run_in_processes(partial(die, killed), 2, "cpu", 4)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)
    assert len(killed.losses) == KILL_AFTER
    validation = run_in_processes(partial(train, dataclasses.replace(killed, config=CONFIG)), 2, "cpu", 4)
    assert killed.losses == whole.losses
    assert len(validation.recall) == CONFIG.validation_levels


class Ticking:
    """A clock that goes on by so many seconds whenever it is read."""

    def __init__(self, tick_s: float) -> None:
        self._now_s, self._tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self._now_s += self._tick_s
        return self._now_s


def exchange(scene: Scene, ranks: Ranks) -> None:
    """What the methods of `Ranks` do, then a run given in minutes whose ranks have different clocks."""
    tensor = torch.full((2, 2), float(ranks.rank))
    ranks.average([tensor], weight=1 + 2 * ranks.rank)
    found: dict[str, Any] = {"average": tensor.tolist(), "total": ranks.total(ranks.rank + 5)}
    found["agreed"] = ranks.agree({"rank": ranks.rank, "tensor": torch.tensor(7 + ranks.rank)})
    weights = [torch.arange(3.0), torch.zeros(2)]
    ranks.require_equal(weights)
    weights[1][0] += 1e-7 * ranks.rank
    try:
        ranks.require_equal(weights)
    except RuntimeError as error:
        found["differing"] = str(error)
    ranks.broadcast(weights)
    ranks.require_equal(weights)
    time.monotonic = Ticking(0.01 * (1 + ranks.rank))  # type: ignore[assignment]
    config = dataclasses.replace(CONFIG, num_steps=None, max_minutes=0.02, checkpoint_minutes=0.005)
    trainer = dataclasses.replace(scene, work=scene.work / "minutes", config=config).trainer(ranks)
    trainer.run(Silent())
    found["steps"] = (trainer.num_steps, ranks.total(trainer.step))
    found["threads"] = torch.get_num_threads()
    torch.save(found, scene.work / f"found-{ranks.rank}.pt")


def test_what_ranks_exchange(whole: Scene) -> None:
    """Catches means without weights, values that differ between ranks, unseen drift, a number of steps every rank
    plans for itself, and threads not divided."""
    for rank in range(2):
        found = torch.load(whole.work / f"found-{rank}.pt")
        assert found["average"] == [[0.75, 0.75], [0.75, 0.75]]
        assert found["total"] == 11
        assert found["agreed"] == {"rank": 0, "tensor": torch.tensor(7)}
        assert "ranks [1]" in found["differing"]
        num_steps, total = found["steps"]
        assert total == 2 * num_steps > 2 * 20
        assert found["threads"] == 2
