"""Training the low-rank candidate projection of a head that is trained already.

The head is frozen; its factors begin as the truncated SVD of its output projection and are drawn towards the full
projection's distribution at every level of the training-time test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_factors import CandidateFactors
from eyas.training.candidate_head import FrozenHead
from eyas.training.dataset import Batch, ComputeStates, Corpus, make_batches, training_order
from eyas.training.loop import StepObserver, TrainingLoop
from eyas.training.optimizer import HeadOptimizer
from eyas.training.shard import read_shard, shard_files


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
        self.loop = TrainingLoop(config, work_folder)
        content = self.loop.read_state()
        self._shards = [str(file.resolve()) for folder in corpus_folders for file in shard_files(folder)]
        if content is not None:
            self._shards = _as_before(content["shards"], self._shards)
        shards = [read_shard(Path(file)) for file in self._shards]
        for file, shard in zip(self._shards, shards, strict=True):
            if shard.features is not None and shard.features.shape[1] != head.feature_size:
                raise ValueError(
                    f"--corpus: {file}: states are {shard.features.shape[1]} wide, those of layers "
                    f"{head.recorded_layers} are {head.feature_size}; give the corpus of this target"
                )
        self.corpus = Corpus(shards, config.max_length, stop_token_id, compute_states)
        self.training, validation = self.corpus.split(config.validation_share)
        by_length = sorted(validation, key=lambda item: item.length)
        self._validation = [self.corpus.batch(group) for group in make_batches(by_length, config.tokens_per_batch)]
        self.factors = CandidateFactors.of(head.output, config.rank)
        self._optimizer = HeadOptimizer(self.factors, config.learning_rate, matrix_rate=0.0, matrix_decay=0.0)
        self.before: CandidateRecall | None = None  # any training; known once the run has begun
        if content is not None:
            self.before = CandidateRecall(**content["before"])
            self.factors.load_state_dict(content["factors"])
            self._optimizer.load_state(content["optimizer"])

    def run(self, observer: StepObserver, stop_after: int | None = None) -> CandidateRecall | None:
        """Train to the end and validate; with `stop_after`, leave after that step without saving, as if killed."""
        if self.before is None:
            self.before = self.validate()
            self.save()  # from here on the choice of shards is fixed
        is_done = self.loop.run(self._train_on, self._batches(), self.save, observer, stop_after)
        return self.validate() if is_done else None

    def _batches(self) -> Iterator[Batch]:
        config = self.config
        for group in training_order(self.training, config.tokens_per_batch, config.seed, self.loop.step):
            yield self.corpus.batch(group)

    def _train_on(self, batch: Batch, rate_share: float) -> tuple[float, Tensor]:
        self._optimizer.set_rate(rate_share)
        divergence, num_recalled, num_rows = self._sums(batch)
        num_rows.clamp_(min=1)
        decay = torch.tensor([self.config.level_decay**level for level in range(self.config.num_levels)])
        loss = (divergence / num_rows) @ decay.to(divergence)
        loss.backward()
        self._optimizer.step(self.config.max_grad_norm)
        return loss.item(), num_recalled / num_rows

    @torch.no_grad()
    def validate(self) -> CandidateRecall:
        """Measure the factors on the validation conversations."""
        sums = torch.stack([torch.stack(self._sums(batch)) for batch in self._validation]).double().sum(dim=0)
        divergence, num_recalled, num_rows = sums
        num_rows.clamp_(min=1)
        return CandidateRecall((num_recalled / num_rows).tolist(), (divergence / num_rows).tolist())

    def _sums(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """By level, over the rows before an answer token: divergence, rows recalled, rows; float32 `[K]` each."""
        precedes_answer = batch.precedes_answer[batch.rows(0) + 1]
        divergences, recalls, counts = [], [], []
        for level, states in enumerate(self.head.scored_states(batch, self.config.num_levels)):
            kept = states[precedes_answer[batch.later_rows(level)].to(states.device)]
            weights = torch.ones(kept.shape[0], device=kept.device)
            divergence, recalled = self.factors.divergence(kept, self.head.output, weights, self.config.num_candidates)
            divergences.append(divergence)
            recalls.append(recalled.sum().float())
            counts.append(weights.sum())
        return torch.stack(divergences), torch.stack(recalls), torch.stack(counts)

    def save(self) -> None:
        """Write everything a resumed run needs."""
        assert self.before is not None
        content: dict[str, Any] = {
            "shards": self._shards,
            "before": asdict(self.before),
            "factors": self.factors.state_dict(),
            "optimizer": self._optimizer.state(),
        }
        self.loop.write_state(content)

    def export(self, folder: Path) -> None:
        """Write the head with the factors as they are now; see `FrozenHead.export`."""
        self.head.export(folder, self.factors, self.config.num_candidates)


def _as_before(written: list[str], given: list[str]) -> list[str]:
    """The shards a run was begun with, which may have become more since."""
    missing = [file for file in written if file not in given]
    if missing:
        raise ValueError(f"--corpus: the run was begun with {missing[0]}, too; resume with the same corpus")
    return written
