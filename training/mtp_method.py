"""Multi-token prediction in training: one decoder layer between the target's embedding and its output projection."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eyas.models.mtp import MtpHead, load_mtp
from eyas.models.mtp_tensors import MIMO, mtp_files
from eyas.training.export import write_folder
from eyas.training.initialisation import NewWeights
from eyas.training.memory_tensors import MemoryTensors
from eyas.training.method import TrainingMethod

_PREFIX = MIMO.prefix.format(0)
_SHARED = ("embedding", "output.weight")


class MtpMethod(TrainingMethod[MtpHead]):
    """Its states are taken after the final norm, where the target's features are too."""

    def new_head(self, weights: NewWeights, token_ids: Tensor, num_levels: int) -> MtpHead:
        """It begins as the target's last layer once more, on the state and a little of the embedding."""
        target, hidden = weights.target, weights.target.hidden_size
        own = {
            "token_layernorm.weight": torch.ones(hidden),
            "hidden_layernorm.weight": torch.ones(hidden),
            "input_proj.weight": torch.cat([torch.eye(hidden), weights.noise(hidden, hidden)], dim=1),
            "final_layernorm.weight": weights.final_norm(),
        }
        tensors = {_PREFIX + name: tensor for name, tensor in (own | weights.last_layer()).items()}
        config = target.raw | {"num_nextn_predict_layers": 1}
        origin = Path("new mtp head")
        files = mtp_files(origin, MIMO, config, MemoryTensors(tensors, origin))
        return weights.head(load_mtp, files, frozen=_SHARED)

    def projected(self, head: MtpHead, states: Tensor, level: int) -> Tensor:
        return states

    def export(self, head: MtpHead, folder: Path) -> None:
        names = {own: name for name, own in MIMO.names.items()}
        glue = {
            "enorm.weight": head.embedding_norm.weight,
            "hnorm.weight": head.feature_norm.weight,
            "eh_proj.weight": head.projection.weight,
            "norm.weight": head.norm.weight,
        }
        tensors = {names[own]: tensor for own, tensor in glue.items()} | head.block.layer.state_dict()
        config = head.config.block
        write_folder(folder, "model.safetensors", config, {_PREFIX + name: x for name, x in tensors.items()})
