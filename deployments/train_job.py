"""What every rank of `eyas train KIND` does: it trains, and the first one shows it and writes the head."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eyas.deployments.corpus_options import ONLINE, target_states
from eyas.models.catalog import resolve_target
from eyas.models.head_writing import save_prior
from eyas.training.progress import TrainingProgress
from eyas.training.ranks import Ranks
from eyas.training.shard import shard_files
from eyas.training.trainer import HeadTrainer
from eyas.training.training_config import TrainingConfig
from eyas.training.validation import Validation


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Args:
    num_steps: that were done.
    best_step: after which the head written was.
    validation: of the head written.
    """

    num_steps: int
    best_step: int
    elapsed_s: float
    validation: Validation


@dataclass(frozen=True, slots=True)
class TrainJob:
    """One training run as it is told to every rank; picklable.

    Args:
        target: name, which every node resolves for itself, or folder.
        out: folder the head is written to.
        options: those of the corpus, see `target_states`.
    """

    config: TrainingConfig
    target: str
    corpus_folders: tuple[Path, ...]
    work_folder: Path
    out: Path
    stop_token_id: int | None
    options: argparse.Namespace

    def run(self, ranks: Ranks) -> TrainResult:
        """Train to the end as one of `ranks`."""
        for folder in self.corpus_folders:
            if not shard_files(folder):
                raise ValueError(f"--corpus: rank {ranks.rank} finds no shard in {folder}; all nodes must see it")
        target_folder = resolve_target(self.target)
        is_online = self.options.states == ONLINE
        trainer = HeadTrainer(
            self.config,
            target_folder,
            self.corpus_folders,
            self.work_folder,
            self.stop_token_id,
            compute_states=target_states(self.options, target_folder, ranks.device) if is_online else None,
            ranks=ranks,
        )
        console = Console(stderr=True, quiet=not ranks.is_first)
        num_ids, coverage = trainer.vocabulary.token_ids.shape[0], trainer.vocabulary.coverage
        console.print(
            f"{len(trainer.training)} conversations to train on; the {num_ids:,} ids the head can propose cover "
            f"{coverage:.2%} of their answer tokens"
        )
        with TrainingProgress(console, trainer.step) as progress:
            validation = trainer.run(progress)
        assert validation is not None
        if ranks.is_first:
            trainer.export(self.out)
            if not self.options.skip_calibration:
                self._calibrate(trainer, console)
        return TrainResult(trainer.step, trainer.best.step, trainer.elapsed_s, validation)

    def _calibrate(self, trainer: HeadTrainer, console: Console) -> None:
        """Write the head's acceptance prior beside its weights."""
        if trainer.num_validation_texts < 2:
            console.print("one text for validation is too little to calibrate scores by; the head keeps its own")
            return
        with console.status("calibrating scores"):
            fit = trainer.fit_prior()
        save_prior(self.out, fit.prior)
        for regime, report in (("greedy", fit.greedy), ("sampled", fit.sampled)):
            before, after = (100 * error for error in report.calibration_error)
            kept = "calibrated scores are used" if report.is_kept else "no gain, the head keeps its own scores"
            console.print(f"{regime}: calibration error {before:.1f} % → {after:.1f} %; {kept}")
