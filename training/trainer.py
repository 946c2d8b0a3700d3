"""Training a draft head on a corpus its target wrote."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from eyas.models.config import DecoderConfig
from eyas.models.head import DraftHead
from eyas.training.batch import Batch
from eyas.training.best_head import BestHead, load_weights, save_weights
from eyas.training.corpus_choice import NAMES, CorpusChoice
from eyas.training.dataset import ComputeStates, Conversation, Corpus, make_batches
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.loop import StepObserver, TrainingLoop, Validations
from eyas.training.methods import training_method
from eyas.training.objective import Objective
from eyas.training.optimizer import HeadOptimizer
from eyas.training.prior_fit import PriorFit, fit_prior
from eyas.training.prior_samples import FeatureReader
from eyas.training.ranks import ALONE, Ranks
from eyas.training.run_batches import RunBatches
from eyas.training.training_config import TrainingConfig
from eyas.training.training_log import VALIDATION_FILE, ValidationLog, ValidationRecord
from eyas.training.validation import Validation, validate
from eyas.training.vocabulary import choose_vocabulary, count_tokens

_BEST_FILE = "best-head.safetensors"
_NUM_SAMPLED_ROWS = 2000  # tell the scale of the target's states


class Observer(StepObserver, Protocol):
    """Is told how training goes."""

    def on_validation(self, step: int, validation: Validation) -> None:
        """After every validation."""


class HeadTrainer:
    """One training run, resumable from its work folder.

    All that is drawn depends on seed, step and batch alone, and so does the order of batches; see `TrainingLoop`.

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
        self.loop = TrainingLoop(config, work_folder, ranks)
        self.best = BestHead(config.patience)
        state = self.loop.read_state()
        self._choice = CorpusChoice.of(corpus_folders, state, self.loop.state_file, ranks)
        target = DecoderConfig.from_folder(target_folder)
        aux_layers = aux_layers or target.default_aux_layers()
        self._recorded = (aux_layers, target.final_index)
        need = f"layers {aux_layers} and the last of this target need"
        shards = self._choice.read((len(aux_layers) + 1) * target.hidden_size, need)
        self.corpus = Corpus(shards, config.max_length, stop_token_id, compute_states)
        self._batches = RunBatches(self.corpus, config, ranks)
        required = [] if stop_token_id is None else [stop_token_id]
        self.method = training_method(config, aux_layers)
        counts = count_tokens(map(self.corpus.answer, self.training), target.vocab_size)
        num_candidates = config.draft_vocab_size if self.method.has_draft_vocabulary else target.vocab_size
        self.vocabulary = choose_vocabulary(counts, num_candidates, required)
        loss_ids = choose_vocabulary(counts, min(config.loss_vocab_size, num_candidates), required).token_ids
        sample = self.corpus.batch(make_batches(self.training, _NUM_SAMPLED_ROWS)[0])
        last_states = sample.features[:, -target.hidden_size :].float()
        state_rms = float(last_states.square().mean(dim=1).sqrt().median())
        weights = NewWeights(target_folder, target, config.compute_dtype, config.seed, state_rms, ranks.device)
        self.head = self.method.new_head(weights, self.vocabulary.token_ids, config.num_levels)
        self._output = TargetOutput.load(target_folder, target, config.compute_dtype, ranks.device)
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
        if state is not None:
            self._load_state(state)
        ranks.broadcast(self.weights.values())

    @property
    def step(self) -> int:
        """Steps done."""
        return self.loop.step

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None while it is being measured."""
        return self.loop.num_steps

    @property
    def elapsed_s(self) -> float:
        """Time the steps took, of all processes that have worked at this run one after the other."""
        return self.loop.elapsed_s

    @property
    def training(self) -> list[Conversation]:
        """Conversations to train on."""
        return self._batches.training

    @property
    def num_validation_texts(self) -> int:
        """Conversations held out; 0 on ranks that do not validate."""
        return sum(len(batch.lengths) for batch in self._batches.held_out)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """All that is trained, by name."""
        return {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}

    def run(self, observer: Observer, stop_after: int | None = None) -> Validation | None:
        """Train to the end and hold the best head then; with `stop_after`, leave after that step as if killed.

        Returns:
            The validation of that head.
        """
        with closing(ValidationLog(self.loop.log_file(VALIDATION_FILE), self.step)) as log:
            check = partial(self._check, observer, log)
            validations = Validations(self.validate, check, lambda: self.best.should_stop)
            if not self.loop.run(self, self._batches.training_from(self.step), observer, stop_after, validations):
                return None
            if self.best.last_step != self.step:
                check()
        self.save()
        if self.ranks.is_first:
            load_weights(self.head, self.loop.work_folder / _BEST_FILE)
        self.ranks.broadcast(self.weights.values())
        return self.best.validation

    def train_on(self, batch: Batch, rate_share: float) -> tuple[float, list[float]]:
        """A step of the loop; see `Trained`."""
        self._optimizer.set_rate(rate_share)
        loss, accuracy = self._objective.compute(batch, self.step)
        loss.backward()
        figures = torch.cat([loss.detach()[None], accuracy])
        figures = self.ranks.average_gradients(self.weights.values(), figures, self._objective.num_kept)
        self._optimizer.step(self.config.max_grad_norm)
        value, *accuracies = figures.tolist()
        return value, accuracies

    def _check(self, observer: Observer, log: ValidationLog) -> None:
        """Validate, and keep the weights if they are the best so far."""
        result = self.validate()
        if self.best.observe(self.step, result) and self.ranks.is_first:
            save_weights(self.weights, self.loop.work_folder / _BEST_FILE)
        log.write(ValidationRecord(self.step, result.recall, result.chain_length, result.tree_length))
        observer.on_validation(self.step, result)

    def validate(self) -> Validation:
        """Measure the head on the validation conversations, in the dtype it is trained in; the first rank does."""
        if not self.ranks.is_first:
            return self.ranks.agree(Validation([], 1.0, 1.0))
        head, batches, levels = self._served_head(), self._batches.validation(), self.config.validation_levels
        return self.ranks.agree(validate(self.method, head, self._output, batches, levels))

    def fit_prior(self) -> PriorFit:
        """Fit the acceptance prior of the head as it is now on the validation conversations; for the first rank.

        Raises:
            ValueError: if these are too few.
        """
        return fit_prior(self._served_head(), FeatureReader(*self._recorded, self._output), self._batches.held_out)

    def _served_head(self) -> DraftHead:
        """The head as it is now, in the dtype it is trained in."""
        head: DraftHead = copy.deepcopy(self.head)
        return head.to(self.config.compute_dtype)

    def export(self, folder: Path) -> None:
        """Write the head as it is now, after `run` the best one; see `TrainingMethod.export`."""
        self.method.export(self.head, folder)

    def save(self) -> None:
        """Write everything a resumed run needs; see `TrainingLoop.save`."""
        self.loop.save(self)

    def state(self) -> dict[str, Any]:
        """What `save` writes of the head; see `Trained`."""
        return {
            NAMES: self._choice.names,
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self._optimizer.state(),
            "best": self.best.state(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["weights"], strict=False)
        self._optimizer.load_state(state["optimizer"])
        if "best" in state:
            self.best.load_state(state["best"])
