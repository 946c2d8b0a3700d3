"""EAGLE-1 in training: the head's states are themselves next features, so they are also compared with the true ones."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.eagle import EagleHead, load_eagle
from eyas.training.export import write_folder
from eyas.training.initialisation import NewWeights, layer_config
from eyas.training.memory_tensors import memory_files
from eyas.training.method import TrainingMethod

_DAMPING = 0.01  # keeps the inverse of a norm's smallest weights in bounds


class EagleMethod(TrainingMethod[EagleHead]):
    """Both losses weigh as in the paper (arXiv:2401.15077, section 3.2): 1 for the regression, 0.1 for the tokens."""

    cross_entropy_share = 0.1

    def new_head(self, weights: NewWeights, token_ids: Tensor, num_levels: int) -> EagleHead:
        """It begins as the target's last layer on the state, in the layout of the authors: no norm before attention.

        That layer reads and writes the state before the final norm, an EAGLE-1 head the one after it: what it reads is
        divided by the final norm's weight, and what it adds is brought to the other's scale.
        """
        hidden, block, norm = weights.target.hidden_size, weights.last_layer(), weights.final_norm()
        inverse = norm / (norm.square() + _DAMPING * norm.square().mean())
        scale = block.pop("input_layernorm.weight") * inverse
        for part in "qkv":
            block[f"self_attn.{part}_proj.weight"] *= scale
        block["post_attention_layernorm.weight"] *= inverse
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            block[name] *= norm[:, None] / weights.state_rms
        fuse = torch.cat([weights.noise(hidden, hidden), torch.eye(hidden)], dim=1)
        tensors = {"fc.weight": fuse} | {f"layers.0.{name}": tensor for name, tensor in block.items()}
        config = {"architectures": ["LlamaForCausalLM"], **layer_config(weights.target), "bias": False}
        return weights.head(load_eagle, memory_files("eagle", config, tensors), ("embedding", "output.weight"))

    def projected(self, head: EagleHead, states: Tensor, level: int) -> Tensor:
        return states

    def state_loss(self, states: Tensor, following: Tensor) -> Tensor:
        """Smooth L1, mean over rows and columns."""
        return F.smooth_l1_loss(states.float(), following.float())

    def export(self, head: EagleHead, folder: Path) -> None:
        write_folder(folder, "model.safetensors", head.config.raw, head.checkpoint_tensors())
