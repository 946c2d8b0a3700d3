"""EAGLE-3 in training: a layer that reads fused states, and an output projection of its own over a draft vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head, load_eagle3
from eyas.training.export import write_folder
from eyas.training.initialisation import NewWeights, TargetOutput, layer_config
from eyas.training.memory_tensors import memory_files
from eyas.training.method import TrainingMethod


class Eagle3Method(TrainingMethod[Eagle3Head]):
    """Args:
    aux_layers: residual-stream indices the head fuses; the corpus holds them and then the last one. None takes the
        default ones of the target.
    num_layers: decoder layers of the head; only the first one reads an embedding.
    """

    has_draft_vocabulary = True

    def __init__(self, aux_layers: tuple[int, ...] | None = None, num_layers: int = 1) -> None:
        self.aux_layers = aux_layers
        self.num_layers = num_layers

    def new_head(self, weights: NewWeights, token_ids: Tensor, num_levels: int) -> Eagle3Head:
        """It begins as the target's last layers reading its last fused state.

        Raises:
            ValueError: if the target has fewer layers.
        """
        target = weights.target
        check_layers(self.num_layers, target)
        aux_layers = self.aux_layers or target.default_aux_layers()
        first, *later = range(target.num_layers - self.num_layers, target.num_layers)
        hidden, block = target.hidden_size, weights.layer(first)
        fuse = weights.noise(hidden, len(aux_layers) * hidden) * 0.1
        fuse[:, -hidden:] += torch.eye(hidden)
        block["hidden_norm.weight"] = block["input_layernorm.weight"]
        block["input_layernorm.weight"] = torch.ones(hidden)
        for part in "qkv":
            name = f"self_attn.{part}_proj.weight"
            block[name] = torch.cat([weights.noise(*block[name].shape), block[name]], dim=1)
        tensors = {
            "fc.weight": fuse,
            **{f"midlayer.{name}": tensor for name, tensor in block.items()},
            **{
                f"layers.{place}.{name}": tensor
                for place, index in enumerate(later, start=1)
                for name, tensor in weights.layer(index).items()
            },
            "norm.weight": weights.final_norm(),
            "lm_head.weight": weights.output()[token_ids],
            "d2t": token_ids - torch.arange(token_ids.shape[0]),
            "t2d": torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True),
        }
        config = head_config(target, aux_layers, token_ids.shape[0], self.num_layers)
        return weights.head(load_eagle3, memory_files("eagle3", config, tensors), frozen=("embedding",))

    def inputs(self, states: Tensor, output: TargetOutput) -> Tensor:
        return states[:, : -output.norm.shape[0]]

    def projected(self, head: Eagle3Head, states: Tensor, level: int) -> Tensor:
        normed: Tensor = head.norm(states)
        return normed

    def export(self, head: Eagle3Head, folder: Path) -> None:
        write_folder(folder, "model.safetensors", head.config.raw, head.checkpoint_tensors())


def check_layers(num_layers: int, target: DecoderConfig) -> None:
    """Raise `ValueError` if a head of so many layers cannot begin as the last ones of the target."""
    if num_layers > target.num_layers:
        raise ValueError(f"num_layers: the target has {target.num_layers}, the head cannot begin as {num_layers}")


def head_config(
    target: DecoderConfig, aux_layers: tuple[int, ...], draft_vocab_size: int, num_layers: int = 1
) -> dict[str, Any]:
    """`config.json` of a head in the published layout, its layers sized like the target's.

    Layer ids are written as residual-stream indices. SGLang, vLLM and Eyas all read them so, unless the first is 1,
    which some take for a layer's output.

    Raises:
        ValueError: for layers that cannot be written without that ambiguity.
    """
    if not aux_layers or aux_layers[0] == 1 or not all(0 <= index <= target.num_layers for index in aux_layers):
        raise ValueError(f"aux_layers: {aux_layers} must lie within the target and must not begin with 1")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(target, num_layers),
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers), "use_aux_hidden_state": True},
    }
