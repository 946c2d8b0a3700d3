"""Training the low-rank candidate projection of a head that is trained already.

The head is frozen; its factors begin as the truncated SVD of its output projection and are drawn towards the full
projection's distribution at every level of the training-time test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.training.batch import Batch
from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_factors import CandidateFactors
from eyas.training.candidate_head import FrozenHead
from eyas.training.corpus_choice import NAMES, CorpusChoice
from eyas.training.dataset import ComputeStates, Corpus
from eyas.training.loop import StepObserver, TrainingLoop
from eyas.training.optimizer import HeadOptimizer
from eyas.training.ranks import Ranks
from eyas.training.run_batches import RunBatches


@dataclass(frozen=True, slots=True)
class CandidateRecall:
    """How well the factors stand for the full projection, by level, on texts they were not trained on.

    Args:
        recall: how often the full projection's first token is among the candidates.
        divergence: of the factors' softmax from the full projection's, Kullback-Leibler, nats.
    """

    recall: list[float]
    divergence: list[float]


class CandidateTrainer:
    """One training run, resumable from its work folder.

    Args:
        head: the one at `config.head`; all is computed on its device.
        corpus_folders: their shards are trained on together, the last ones being for validation.
        stop_token_id: cut from the end of an answer; None for a target that has none.
        compute_states: gives the states of shards that hold none, see `Corpus`.

    Raises:
        ValueError: for settings, a head or a corpus that do not go together.
    """

    def __init__(
        self,
        config: CandidateConfig,
        head: FrozenHead,
        corpus_folders: Sequence[Path],
        work_folder: Path,
        stop_token_id: int | None,
        compute_states: ComputeStates | None = None,
    ) -> None:
        head.check(config)
        self.config = config
        self.head = head
        ranks = Ranks(device=head.device)
        self.loop = TrainingLoop(config, work_folder, ranks)
        state = self.loop.read_state()
        self._choice = CorpusChoice.of(corpus_folders, state, self.loop.state_file, ranks)
        shards = self._choice.read(head.feature_size, f"those of layers {head.recorded_layers} are")
        self.corpus = Corpus(shards, config.max_length, stop_token_id, compute_states)
        self._batches = RunBatches(self.corpus, config, ranks)
        self.factors = CandidateFactors.of(head.output, config.rank)
        self._optimizer = HeadOptimizer(self.factors, config.learning_rate, matrix_rate=0.0, matrix_decay=0.0)
        self.before: CandidateRecall | None = None  # any training; known once the run has begun
        if state is not None:
            self.before = CandidateRecall(**state["before"])
            self.factors.load_state_dict(state["factors"])
            self._optimizer.load_state(state["optimizer"])

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """All that is trained, by name."""
        return dict(self.factors.named_parameters())

    def run(self, observer: StepObserver, stop_after: int | None = None) -> CandidateRecall | None:
        """Train to the end and validate; with `stop_after`, leave after that step without saving, as if killed."""
        if self.before is None:
            self.before = self.validate()
        if not self.loop.run(self, self._batches.training_from(self.loop.step), observer, stop_after):
            return None
        self.loop.save(self)
        return self.validate()

    def train_on(self, batch: Batch, rate_share: float) -> tuple[float, list[float]]:
        """A step of the loop; see `Trained`."""
        self._optimizer.set_rate(rate_share)
        divergence, num_recalled, num_rows = self._sums(batch)
        num_rows.clamp_(min=1)
        decay = torch.tensor([self.config.level_decay**level for level in range(self.config.num_levels)])
        loss = (divergence / num_rows) @ decay.to(divergence)
        loss.backward()
        self._optimizer.step(self.config.max_grad_norm)
        return loss.item(), (num_recalled / num_rows).tolist()

    @torch.no_grad()
    def validate(self) -> CandidateRecall:
        """Measure the factors on the validation conversations."""
        sums = torch.stack([torch.stack(self._sums(batch)) for batch in self._batches.validation()]).double().sum(dim=0)
        divergence, num_recalled, num_rows = sums
        num_rows.clamp_(min=1)
        return CandidateRecall((num_recalled / num_rows).tolist(), (divergence / num_rows).tolist())

    def _sums(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """By level, over the rows before an answer token: divergence, rows recalled, rows; float32 `[K]` each."""
        precedes_answer = batch.precedes_answer[batch.rows(0) + 1]
        divergences, recalls, counts = [], [], []
        for level, states in enumerate(self.head.scored_states(batch, self.config.num_levels)):
            kept = states[precedes_answer[batch.later_rows(level)]]
            weights = torch.ones(kept.shape[0], device=kept.device)
            divergence, recalled = self.factors.divergence(kept, self.head.output, weights, self.config.num_candidates)
            divergences.append(divergence)
            recalls.append(recalled.sum().float())
            counts.append(weights.sum())
        return torch.stack(divergences), torch.stack(recalls), torch.stack(counts)

    def state(self) -> dict[str, Any]:
        """What the loop saves of the factors; see `Trained`."""
        assert self.before is not None
        return {
            NAMES: self._choice.names,
            "before": asdict(self.before),
            "factors": self.factors.state_dict(),
            "optimizer": self._optimizer.state(),
        }

    def export(self, folder: Path) -> None:
        """Write the head with the factors as they are now; see `FrozenHead.export`."""
        self.head.export(folder, self.factors, self.config.num_candidates)
