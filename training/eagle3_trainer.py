"""Training an EAGLE-3 head on a corpus its target wrote."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.training.corpus import read_shard, shard_files
from eyas.training.dataset import Batch, Corpus, make_batches, training_order
from eyas.training.initialisation import TargetOutput, new_head
from eyas.training.objective import Objective, Validation, validate
from eyas.training.optimizer import HeadOptimizer
from eyas.training.training_log import StepRecord, TrainingLog
from eyas.training.vocabulary import choose_vocabulary, count_tokens

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STATE_FILE = "training-state.pt"
_PACE_STEPS = 20  # steps timed before a run given in minutes knows its number of steps
_SLACK = 0.95  # of the minutes is planned with, because a shared machine slows down


@dataclass(frozen=True, slots=True)
class Eagle3TrainingConfig:
    """How to train.

    Args:
        num_steps: batches to train on; None takes as many as fit into `max_minutes`.
        max_minutes: wall time to plan for when `num_steps` is None, judged by the speed of the first steps.
        tokens_per_batch: rows of a batch.
        ttt_steps: steps of the training-time test; step i counts `step_decay ** i`.
        learning_rate, matrix_rate, matrix_decay: see `HeadOptimizer`.
        warmup_steps: the rates rise linearly over these, then fall along a cosine to `final_rate_share`.
        validation_share: the last conversations of the corpus, not trained on.
        dtype: what is computed in; weights and optimiser are always float32.
    """

    num_steps: int | None = None
    max_minutes: float | None = None
    draft_vocab_size: int = 8192
    tokens_per_batch: int = 3000
    max_length: int = 2048
    ttt_steps: int = 3
    step_decay: float = 0.8
    learning_rate: float = 1.2e-3
    matrix_rate: float = 1e-2
    matrix_decay: float = 0.1
    final_rate_share: float = 0.02
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    validation_share: float = 0.02
    checkpoint_minutes: float = 5.0
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.max_minutes is None):
            raise ValueError("num_steps, max_minutes: give exactly one of them")
        for name in ("num_steps", "draft_vocab_size", "tokens_per_batch", "ttt_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        for name in ("max_minutes", "learning_rate", "step_decay", "max_grad_norm", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: must be above 0, got {value}")
        if self.max_length < 3:
            raise ValueError(f"max_length: must be at least 3, got {self.max_length}")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share: must be between 0 and 1, got {self.validation_share}")
        if not 0.0 <= self.final_rate_share <= 1.0:
            raise ValueError(f"final_rate_share: must be between 0 and 1, got {self.final_rate_share}")
        if min(self.warmup_steps, self.matrix_rate, self.matrix_decay) < 0:
            raise ValueError("warmup_steps, matrix_rate, matrix_decay: must not be negative")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: {self.dtype} is not supported; use one of {sorted(_DTYPES)}")

    def rate_share(self, step: int, num_steps: int | None) -> float:
        """Share of the rates a step uses; as long as `num_steps` is unknown it only warms up."""
        warmup = self.warmup_steps if num_steps is None else min(self.warmup_steps, num_steps // 5)
        if step < warmup or num_steps is None:
            return min(1.0, (step + 1) / max(1, warmup))
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_rate_share + (1.0 - self.final_rate_share) * cosine


class Observer(Protocol):
    """Is told how training goes."""

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        """After every step; `num_steps` is None while it is being measured."""

    def on_validation(self, step: int, validation: Validation) -> None:
        """After every validation."""


class Eagle3Trainer:
    """One training run, resumable from its work folder.

    The order of batches depends on seed and step alone, and nothing else is random, so a resumed run repeats the losses
    an uninterrupted one would have had, whatever the time it was killed.

    Args:
        aux_layers: residual-stream indices the head fuses; the corpus holds them and then the last one.
        stop_token_id: always part of the draft vocabulary.
    """

    def __init__(
        self,
        config: Eagle3TrainingConfig,
        target_folder: Path,
        corpus_folder: Path,
        work_folder: Path,
        stop_token_id: int,
        aux_layers: tuple[int, ...] | None = None,
    ) -> None:
        self.config = config
        self.work_folder = work_folder
        self.num_steps = config.num_steps
        self.step = 0
        self.elapsed_s = 0.0
        state = self._read_state()
        target = DecoderConfig.from_folder(target_folder)
        dtype = _DTYPES[config.dtype]
        self._shard_names = (
            [file.name for file in shard_files(corpus_folder)] if state is None else state["shard_names"]
        )
        shards = [read_shard(corpus_folder / name) for name in self._shard_names]
        self.corpus = Corpus(shards, config.max_length, stop_token_id)
        self.aux_layers = aux_layers or target.default_aux_layers()
        width, expected = shards[0].features.shape[1], (len(self.aux_layers) + 1) * target.hidden_size
        if width != expected:
            raise ValueError(
                f"{corpus_folder}: features are {width} wide, {self.aux_layers} and the last need {expected}"
            )
        self.training, validation = self.corpus.split(config.validation_share)
        answers = (self.corpus.answer(conversation) for conversation in self.training)
        self.vocabulary = choose_vocabulary(
            count_tokens(answers, target.vocab_size), config.draft_vocab_size, [stop_token_id]
        )
        self.head = new_head(target_folder, target, self.aux_layers, self.vocabulary.token_ids, dtype, config.seed)
        self._output = TargetOutput.load(target_folder, target, dtype)
        self._objective = Objective(
            self.head, self._output.restricted(self.vocabulary.token_ids), config.ttt_steps, config.step_decay
        )
        self._optimizer = HeadOptimizer(self.head, config.learning_rate, config.matrix_rate, config.matrix_decay)
        by_length = sorted(validation, key=lambda item: item.length)
        self._validation = [self.corpus.batch(group) for group in make_batches(by_length, config.tokens_per_batch)]
        if state is not None:
            self._load_state(state)

    @property
    def steps_per_epoch(self) -> float:
        """Batches it takes to see the training conversations once, nearly."""
        return sum(conversation.length for conversation in self.training) / self.config.tokens_per_batch

    def run(self, observer: Observer, stop_after: int | None = None) -> Validation | None:
        """Train to the end and validate; with `stop_after`, leave after that step without saving, as if killed."""
        config = self.config
        if self.step == 0:
            self.save()  # from here on the choice of shards is fixed
        log = TrainingLog(self.work_folder / "log.jsonl", self.step)
        order = training_order(self.training, config.tokens_per_batch, config.seed, self.step)
        pace: list[float] = []
        begin, last_save = time.monotonic() - self.elapsed_s, time.monotonic()
        while self.num_steps is None or self.step < self.num_steps:
            step_begin = time.monotonic()
            record = self._train_on(self.corpus.batch(next(order)), begin)
            log.write(record)
            self.step += 1
            now = time.monotonic()
            self.elapsed_s = now - begin
            if self.num_steps is None:
                pace.append(now - step_begin)
                if len(pace) == _PACE_STEPS:
                    assert config.max_minutes is not None
                    left_s = max(0.0, _SLACK * 60.0 * config.max_minutes - self.elapsed_s)
                    self.num_steps = self.step + int(left_s / (sum(pace) / len(pace)))
            observer.on_step(record, self.num_steps)
            if stop_after is not None and self.step >= stop_after:
                log.close()
                return None
            if now - last_save > 60.0 * config.checkpoint_minutes:
                self.save()
                observer.on_validation(self.step, self.validate())
                last_save = time.monotonic()
        log.close()
        self.save()
        result = self.validate()
        observer.on_validation(self.step, result)
        return result

    def validate(self) -> Validation:
        """Measure the head on the validation conversations, in the dtype it is trained in."""
        head = copy.deepcopy(self.head).to(_DTYPES[self.config.dtype])
        return validate(head, self._output, self._validation, self.config.ttt_steps)

    def _train_on(self, batch: Batch, begin: float) -> StepRecord:
        share = self.config.rate_share(self.step, self.num_steps)
        self._optimizer.set_rate(share)
        loss, accuracy = self._objective.compute(batch)
        loss.backward()
        self._optimizer.step(self.config.max_grad_norm)
        value = loss.item()
        if not math.isfinite(value):
            raise RuntimeError(f"step {self.step}: the loss is {value}; start again with a lower learning_rate")
        num_tokens, elapsed_s = batch.token_ids.shape[0], time.monotonic() - begin
        return StepRecord(self.step, value, accuracy.tolist(), share, num_tokens, elapsed_s)

    def save(self) -> None:
        """Write everything a resumed run needs; the file appears complete or not at all."""
        self.work_folder.mkdir(parents=True, exist_ok=True)
        partial = self.work_folder / f"{_STATE_FILE}.partial"
        torch.save(
            {
                "config": asdict(self.config),
                "step": self.step,
                "num_steps": self.num_steps,
                "elapsed_s": self.elapsed_s,
                "shard_names": self._shard_names,
                "weights": _without_embedding(self.head),
                "optimizer": self._optimizer.state(),
            },
            partial,
        )
        partial.replace(self.work_folder / _STATE_FILE)

    def _read_state(self) -> dict[str, Any] | None:
        file = self.work_folder / _STATE_FILE
        if not file.exists():
            return None
        state: dict[str, Any] = torch.load(file, weights_only=True)
        given = asdict(self.config)
        changed = [
            name for name, value in state["config"].items() if name != "checkpoint_minutes" and given[name] != value
        ]
        if changed:
            raise ValueError(
                f"{file} was written with {changed[0]} = {state['config'][changed[0]]}, now it is {given[changed[0]]}; "
                "resume with the same settings or choose another work folder"
            )
        return state

    def _load_state(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["weights"], strict=False)
        self._optimizer.load_state(state["optimizer"])
        self.step, self.num_steps, self.elapsed_s = state["step"], state["num_steps"], state["elapsed_s"]


def _without_embedding(head: Eagle3Head) -> dict[str, Tensor]:
    return {name: weight for name, weight in head.state_dict().items() if name != "embedding"}
