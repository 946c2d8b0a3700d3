"""Training a draft head on a corpus its target wrote."""

from __future__ import annotations

import copy
import itertools
import math
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from eyas.models.config import DecoderConfig
from eyas.training.best_head import BestHead, load_weights, save_weights
from eyas.training.dataset import Batch, ComputeStates, Corpus, make_batches, training_order
from eyas.training.heap import return_freed_memory
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.methods import training_method
from eyas.training.objective import Objective
from eyas.training.optimizer import HeadOptimizer
from eyas.training.prior_fit import PriorFit, fit_prior
from eyas.training.prior_samples import FeatureReader
from eyas.training.ranks import ALONE, Ranks
from eyas.training.shard import read_shard, shard_files
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import (
    LOG_FILE,
    VALIDATION_FILE,
    StepRecord,
    TrainingLog,
    ValidationLog,
    ValidationRecord,
)
from eyas.training.validation import Validation, validate
from eyas.training.vocabulary import choose_vocabulary, count_tokens

_STATE_FILE = "training-state.pt"
_BEST_FILE = "best-head.safetensors"
_PACE_STEPS = 20  # steps timed before a run given in minutes knows its number of steps
_NUM_SAMPLED_ROWS = 2000  # tell the scale of the target's states
_TRIM_STEPS = 10
_SLACK = 0.95  # of the minutes is planned with, because a shared machine slows down


class Observer(Protocol):
    """Is told how training goes."""

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        """After every step; `num_steps` is None while it is being measured."""

    def on_validation(self, step: int, validation: Validation) -> None:
        """After every validation."""


class HeadTrainer:
    """One training run, resumable from its work folder.

    The order of batches and all that is drawn depend on seed, step and batch alone, so a resumed run repeats the losses
    an uninterrupted one would have had, whatever the time it was killed. Of several ranks, rank r takes the batch
    `step * size + r` of that order; the first one decides what depends on the clock, and it alone writes files.

    Args:
        corpus_folders: their shards are trained on together, the last ones being for validation.
        stop_token_id: the loss is always taken over it too; None for a target that has none.
        aux_layers: residual-stream indices the corpus holds before the last one, which an EAGLE-3 head fuses; None is
            the target's default ones.
        compute_states: gives the states of shards that hold none, see `Corpus`.
        ranks: this process among those that train together; it computes on their device.
    """

    def __init__(
        self,
        config: TrainingConfig,
        target_folder: Path,
        corpus_folders: Sequence[Path],
        work_folder: Path,
        stop_token_id: int | None,
        aux_layers: tuple[int, ...] | None = None,
        compute_states: ComputeStates | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.work_folder = work_folder
        self.num_steps = config.num_steps
        self.step = 0
        self.elapsed_s = 0.0
        self.best = BestHead(config.patience)
        state = ranks.agree(self._read_state(corpus_folders) if ranks.is_first else None)
        target = DecoderConfig.from_folder(target_folder)
        dtype = config.compute_dtype
        found = [(str(folder.resolve()), file.name) for folder in corpus_folders for file in shard_files(folder)]
        self._shard_names: list[tuple[str, str]] = ranks.agree(found) if state is None else state["shard_names"]
        shards = [read_shard(Path(folder, name)) for folder, name in self._shard_names]
        aux_layers = aux_layers or target.default_aux_layers()
        self._recorded = (aux_layers, target.final_index)
        expected = (len(aux_layers) + 1) * target.hidden_size
        for (folder, name), shard in zip(self._shard_names, shards, strict=True):
            if shard.features is not None and shard.features.shape[1] != expected:
                raise ValueError(
                    f"--corpus: {folder}/{name}: states are {shard.features.shape[1]} wide, layers {aux_layers} and "
                    f"the last of this target need {expected}; give the corpus of this target"
                )
        self.corpus = Corpus(shards, config.max_length, stop_token_id, compute_states)
        self.training, validation = self.corpus.split(config.validation_share)
        answers = (self.corpus.answer(conversation) for conversation in self.training)
        required = [] if stop_token_id is None else [stop_token_id]
        self.method = training_method(config, aux_layers)
        counts = count_tokens(answers, target.vocab_size)
        num_candidates = config.draft_vocab_size if self.method.has_draft_vocabulary else target.vocab_size
        self.vocabulary = choose_vocabulary(counts, num_candidates, required)
        loss_ids = choose_vocabulary(counts, min(config.loss_vocab_size, num_candidates), required).token_ids
        sample = self.corpus.batch(make_batches(self.training, _NUM_SAMPLED_ROWS)[0])
        last_states = sample.features[:, -target.hidden_size :].float()
        state_rms = float(last_states.square().mean(dim=1).sqrt().median())
        weights = NewWeights(target_folder, target, dtype, config.seed, state_rms, ranks.device)
        self.head = self.method.new_head(weights, self.vocabulary.token_ids, config.num_levels)
        self._output = TargetOutput.load(target_folder, target, dtype, ranks.device)
        self._objective = Objective(
            self.method,
            self.head,
            self._output,
            loss_ids.to(ranks.device),
            config.num_levels,
            config.level_decay,
            config.num_sampled,
            config.objective_options,
        )
        self._optimizer = HeadOptimizer(self.head, config.learning_rate, config.matrix_rate, config.matrix_decay)
        by_length = sorted(validation, key=lambda item: item.length) if ranks.is_first else []
        self._validation = [self.corpus.batch(group) for group in make_batches(by_length, config.tokens_per_batch)]
        if state is not None:
            self._load_state(state)
        ranks.broadcast(self._trained.values())

    @property
    def steps_per_epoch(self) -> float:
        """Steps it takes to see the training conversations once, nearly."""
        num_tokens = sum(conversation.length for conversation in self.training)
        return num_tokens / (self.config.tokens_per_batch * self.ranks.size)

    def run(self, observer: Observer, stop_after: int | None = None) -> Validation | None:
        """Train to the end and hold the best head then; with `stop_after`, leave after that step as if killed.

        Returns:
            The validation of that head.
        """
        if self.step == 0:
            self.save()  # from here on the choice of shards is fixed
        with (
            closing(TrainingLog(self._log_file(LOG_FILE), self.step)) as log,
            closing(ValidationLog(self._log_file(VALIDATION_FILE), self.step)) as validations,
        ):
            if not self._train(observer, log, validations, stop_after):
                return None
            if self.best.last_step != self.step:
                self._check(observer, validations)
        self.save()
        if self.ranks.is_first:
            load_weights(self.head, self.work_folder / _BEST_FILE)
        self.ranks.broadcast(self._trained.values())
        return self.best.validation

    def _train(self, observer: Observer, log: TrainingLog, validations: ValidationLog, stop_after: int | None) -> bool:
        """Whether training came to its end, not to `stop_after`."""
        config, ranks = self.config, self.ranks
        first_batch = self.step * ranks.size + ranks.rank
        order = training_order(self.training, config.tokens_per_batch, config.seed, first_batch)
        order = itertools.islice(order, 0, None, ranks.size)
        pace: list[float] = []
        begin, last_save = time.monotonic() - self.elapsed_s, time.monotonic()
        while not self.is_finished:
            step_begin = time.monotonic()
            record = self._train_on(self.corpus.batch(next(order)).to(ranks.device), begin)
            log.write(record)
            self.step += 1
            if self.step % _TRIM_STEPS == 0:
                return_freed_memory()
            now = time.monotonic()
            self.elapsed_s = now - begin
            if self.num_steps is None:
                pace.append(now - step_begin)
                if len(pace) == _PACE_STEPS:
                    self.num_steps = ranks.agree(self._plan(sum(pace) / len(pace)))
            observer.on_step(record, self.num_steps)
            if config.is_validated_after(self.step, self.num_steps):
                self._check(observer, validations)
            if stop_after is not None and self.step >= stop_after:
                return False
            if ranks.agree(now - last_save > 60.0 * config.checkpoint_minutes):
                self.save()
                last_save = time.monotonic()
        return True

    def _log_file(self, name: str) -> Path:
        """Where a log goes; only the first rank's is kept."""
        return self.work_folder / name if self.ranks.is_first else Path(os.devnull)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done or patience has run out."""
        return self.best.should_stop or (self.num_steps is not None and self.step >= self.num_steps)

    def _plan(self, step_s: float) -> int:
        """Number of steps that the minutes allow, judged by a step and a validation."""
        assert self.config.max_minutes is not None
        begin = time.monotonic()
        self.validate()
        validation_s = time.monotonic() - begin
        left_s = _SLACK * 60.0 * self.config.max_minutes - self.elapsed_s - validation_s
        return self.step + self.config.planned_steps(left_s, step_s, validation_s)

    def _check(self, observer: Observer, validations: ValidationLog) -> None:
        """Validate, and keep the weights if they are the best so far."""
        result = self.validate()
        if self.best.observe(self.step, result) and self.ranks.is_first:
            save_weights(self._trained, self.work_folder / _BEST_FILE)
        validations.write(ValidationRecord(self.step, result.recall, result.chain_length, result.tree_length))
        observer.on_validation(self.step, result)

    def validate(self) -> Validation:
        """Measure the head on the validation conversations, in the dtype it is trained in; the first rank does."""
        if not self.ranks.is_first:
            return self.ranks.agree(Validation([], 1.0, 1.0))
        head = copy.deepcopy(self.head).to(self.config.compute_dtype)
        batches = (batch.to(self.ranks.device) for batch in self._validation)
        levels = self.config.validation_levels
        return self.ranks.agree(validate(self.method, head, self._output, batches, levels))

    @property
    def num_validation_texts(self) -> int:
        """Conversations held out; 0 on ranks that do not validate."""
        return sum(len(batch.lengths) for batch in self._validation)

    def fit_prior(self) -> PriorFit:
        """Fit the acceptance prior of the head as it is now on the validation conversations; for the first rank.

        Raises:
            ValueError: if these are too few.
        """
        head = copy.deepcopy(self.head).to(self.config.compute_dtype)
        batches = [batch.to(self.ranks.device) for batch in self._validation]
        return fit_prior(head, FeatureReader(*self._recorded, self._output), batches)

    def export(self, folder: Path) -> None:
        """Write the head as it is now, after `run` the best one; see `TrainingMethod.export`."""
        self.method.export(self.head, folder)

    def _train_on(self, batch: Batch, begin: float) -> StepRecord:
        share = self.config.rate_share(self.step, self.num_steps)
        self._optimizer.set_rate(share)
        loss, accuracy = self._objective.compute(batch, self.step)
        loss.backward()
        figures = torch.cat([loss.detach()[None], accuracy])
        figures = self.ranks.average_gradients(self._trained.values(), figures, self._objective.num_kept)
        self._optimizer.step(self.config.max_grad_norm)
        value, *accuracies = figures.tolist()
        if not math.isfinite(value):
            raise RuntimeError(f"step {self.step}: the loss is {value}; start again with a lower learning_rate")
        num_tokens, elapsed_s = self.ranks.total(batch.token_ids.shape[0]), time.monotonic() - begin
        return StepRecord(self.step, value, accuracies, share, num_tokens, elapsed_s)

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}

    def save(self) -> None:
        """Write everything a resumed run needs, if this is the first rank; the file appears complete or not at all.

        Raises:
            RuntimeError: if the ranks have drifted apart.
        """
        self.ranks.require_equal(self._trained.values())
        if not self.ranks.is_first:
            return
        self.work_folder.mkdir(parents=True, exist_ok=True)
        partial = self.work_folder / f"{_STATE_FILE}.partial"
        torch.save(
            {
                "config": asdict(self.config),
                "step": self.step,
                "num_steps": self.num_steps,
                "elapsed_s": self.elapsed_s,
                "shard_names": self._shard_names,
                "num_ranks": self.ranks.size,
                "weights": {name: weight.detach() for name, weight in self._trained.items()},
                "optimizer": self._optimizer.state(),
                "best": self.best.state(),
            },
            partial,
        )
        partial.replace(self.work_folder / _STATE_FILE)

    def _read_state(self, corpus_folders: Sequence[Path]) -> dict[str, Any] | None:
        file = self.work_folder / _STATE_FILE
        if not file.exists():
            return None
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        if state.get("num_ranks", 1) != self.ranks.size:
            raise ValueError(
                f"{file} was written by {state.get('num_ranks', 1)} ranks, now there are {self.ranks.size}; resume "
                "with as many or choose another work folder"
            )
        if any(isinstance(name, str) for name in state["shard_names"]):
            raise ValueError(
                f"{file} was written by an earlier version and does not say which folders its shards are in; choose "
                "another work folder"
            )
        folders = list(dict.fromkeys(folder for folder, _ in state["shard_names"]))
        given_folders = [str(folder.resolve()) for folder in corpus_folders if shard_files(folder)]
        if folders != given_folders:
            raise ValueError(
                f"{file} was written with the corpus {', '.join(folders)}, now it is {', '.join(given_folders)}; "
                "resume with the same --corpus or choose another work folder"
            )
        given = asdict(self.config)
        changed = [
            name for name, value in state["config"].items() if name != "checkpoint_minutes" and given.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"{file} was written with {changed[0]} = {state['config'][changed[0]]}, now it is "
                f"{given.get(changed[0])}; resume with the same settings or choose another work folder"
            )
        return state

    def _load_state(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["weights"], strict=False)
        self._optimizer.load_state(state["optimizer"])
        if "best" in state:
            self.best.load_state(state["best"])
        self.step, self.num_steps, self.elapsed_s = state["step"], state["num_steps"], state["elapsed_s"]
