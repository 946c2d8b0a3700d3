"""A trained head that is left as it is while its candidate projection is trained.

Letters: T rows, R bases, A recorded layers besides the last, H target hidden, S head hidden, Vd scored vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eyas.models.candidate_projection import CANDIDATE_TENSORS, DOWN, UP
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleHead
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head, open_head
from eyas.models.head_writing import write_eagle_folder
from eyas.models.heads_file import INTEGER_TENSORS
from eyas.models.target_weights import TargetWeights
from eyas.training.batch import Batch
from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_factors import CandidateFactors, check_rank
from eyas.training.initialisation import TargetOutput
from eyas.training.memory_tensors import memory_files
from eyas.training.states import recorded_layers
from eyas.training.ttt import training_time_test

_CPU = torch.device("cpu")
_PRIOR = "acceptance_prior"
_WITHOUT_PLACE = frozenset({"norm.weight", "lm_head.weight"})  # in an EAGLE-1 folder


class FrozenHead:
    """The head, in the dtype to compute in.

    Args:
        path: of an EAGLE-1 or EAGLE-3 head in any format that is read.
        aux_layers: residual-stream indices the corpus holds before the last one; None is the target's default ones.

    Raises:
        ValueError: for a kind of head without a place for the factors, a head of another target, or one that reads
            states the corpus does not hold.
    """

    def __init__(
        self,
        path: Path,
        target_folder: Path,
        dtype: torch.dtype,
        aux_layers: tuple[int, ...] | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.files = open_head(path)
        if self.files.kind not in ("eagle", "eagle3"):
            raise ValueError(
                f"head: {path} is of kind {self.files.kind}, which has no place for a low-rank candidate projection; "
                "give an EAGLE-1 or EAGLE-3 head"
            )
        self._target = target = DecoderConfig.from_folder(target_folder)
        head = load_head(path, TargetWeights(target_folder, target), dtype, device)
        assert isinstance(head, EagleHead | Eagle3Head)
        self.head = head.requires_grad_(False)
        self.recorded_layers = recorded_layers(target) if aux_layers is None else (*aux_layers, target.num_layers)
        if not {*self.recorded_layers, target.final_index}.issuperset(head.capture):
            raise ValueError(
                f"head: {path} reads the target's states {head.capture}, a corpus holds {self.recorded_layers}; its "
                "factors cannot be trained on it"
            )
        self._target_output = TargetOutput.load(target_folder, target, dtype, device)

    @property
    def device(self) -> torch.device:
        """Where all is computed."""
        return self.head.device

    @property
    def output(self) -> Tensor:
        """The full output projection, `[Vd, S]`."""
        return self.head.output.weight

    @property
    def has_prior(self) -> bool:
        """Whether its config holds an acceptance prior, which `export` leaves out."""
        return self.files.config.get(_PRIOR) is not None

    @property
    def feature_size(self) -> int:
        """Width of what a corpus holds of every position."""
        return len(self.recorded_layers) * self._target.hidden_size

    def check(self, config: CandidateConfig) -> None:
        """Raise `ValueError` for a rank or a number of candidates that this head cannot have."""
        check_rank(self.output, config.rank)
        num_rows = self.output.shape[0]
        if config.num_candidates >= num_rows:
            raise ValueError(
                f"num_candidates: must be below the {num_rows} tokens the head scores, got {config.num_candidates}"
            )

    @torch.no_grad()
    def scored_states(self, batch: Batch, num_levels: int) -> list[Tensor]:
        """What the output projection reads at every base of every level: `num_levels` tensors `[R_k, S]`.

        Args:
            batch: on the head's device.
        """
        recorded = batch.features.to(self.head.dtype)
        by_layer = dict(zip(self.recorded_layers, recorded.chunk(len(self.recorded_layers), dim=-1), strict=True))
        final_index = self._target.final_index
        read = [
            self._target_output.normed(by_layer[self._target.num_layers]) if index == final_index else by_layer[index]
            for index in self.head.capture
        ]
        levels = training_time_test(self.head, torch.cat(read, dim=-1), batch, num_levels)
        return [self.head.scored(states) * self.head.config.logit_scale for states in levels]

    def export(self, folder: Path, factors: CandidateFactors, num_candidates: int) -> None:
        """Write the head as its authors do, every tensor as it was found, with the factors in bfloat16.

        An acceptance prior is left out: it was fitted to scores over all tokens, not over the candidates alone.

        Raises:
            ValueError: if the folder is not new or empty.
        """
        source = self.files.tensors
        kept = [name for name in source.names if name not in CANDIDATE_TENSORS]
        tensors = {
            name: source.read(name, source.shape(name), INTEGER_TENSORS.get(name, torch.float32)) for name in kept
        }
        tensors[DOWN], tensors[UP] = (x.detach().bfloat16().cpu() for x in (factors.down, factors.up))
        config = {name: value for name, value in self.files.config.items() if name != _PRIOR}
        config["num_candidates"] = num_candidates
        write_eagle_folder(folder, memory_files(self.files.kind, config, tensors), self._target)

    def check_export(self, folder: Path) -> None:
        """Raise `ValueError` for what `export` would refuse, before hours are spent."""
        if self.files.kind == "eagle" and not _WITHOUT_PLACE.isdisjoint(self.files.tensors.names):
            raise ValueError(
                f"head: {self.files.path} has a norm or an output projection of its own, for which the folder of an "
                "EAGLE-1 head has no place"
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} exists and is not an empty folder; give another name")
