"""Medusa in training: every head reads the same state of the target, so all levels of a base come from one row."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eyas.models.medusa import MedusaHead, load_medusa
from eyas.training.batch import Batch
from eyas.training.export import write_folder
from eyas.training.initialisation import NewWeights
from eyas.training.memory_tensors import memory_files
from eyas.training.method import TrainingMethod


class MedusaMethod(TrainingMethod[MedusaHead]):
    """Args:
    has_own_projection: every head trains an output projection of its own; else all use the target's.
    """

    def __init__(self, has_own_projection: bool = False) -> None:
        self.has_own_projection = has_own_projection

    def new_head(self, weights: NewWeights, token_ids: Tensor, num_levels: int) -> MedusaHead:
        """One residual block a head that changes nothing yet (arXiv:2401.10774, section 2.1.1)."""
        hidden = weights.target.hidden_size
        tensors = {}
        for head in range(num_levels):
            tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden)
            tensors[f"blocks.{head}.layers.0.bias"] = torch.zeros(hidden)
            if self.has_own_projection:
                tensors[f"lm_heads.{head}.weight"] = weights.output()
        files = memory_files("medusa", {"vocab_size": weights.target.vocab_size}, tensors)
        return weights.head(load_medusa, files, () if self.has_own_projection else ("output.weight",))

    def level_states(self, head: MedusaHead, inputs: Tensor, batch: Batch, num_levels: int) -> list[Tensor]:
        return [inputs.index_select(0, batch.rows(level)) for level in range(num_levels)]

    def projected(self, head: MedusaHead, states: Tensor, level: int) -> Tensor:
        return head.hidden(states, range(level + 1, level + 2))[0]

    def projection(self, head: MedusaHead, level: int) -> Tensor:
        weight = head.output.weight
        return weight if weight.ndim == 2 else weight[level]

    def export(self, head: MedusaHead, folder: Path) -> None:
        config = {
            "medusa_num_heads": head.config.num_heads,
            "medusa_num_layers": head.config.num_layers,
            "hidden_size": head.config.hidden_size,
            "vocab_size": head.config.draft_vocab_size,
        }
        write_folder(folder, "medusa_lm_head.safetensors", config, head.checkpoint_tensors())
