"""What a new head starts from: the target's own weights, and noise that depends on the seed alone.

Letters: H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig
from eyas.models.head import DraftHead
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.target_weights import TargetWeights

Head = TypeVar("Head", bound=DraftHead, covariant=True)

_NOISE = 0.02
_CPU = torch.device("cpu")
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The target from its last residual state on.

    Args:
        norm: weight of the final norm, `[H]`.
        weight: output projection, `[V, H]`.
    """

    norm: Tensor
    weight: Tensor
    eps: float

    @staticmethod
    def load(folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device = _CPU) -> TargetOutput:
        """Read it from the target's folder."""
        return TargetOutput(
            norm=Checkpoint(folder).read("model.norm.weight", (config.hidden_size,), dtype).to(device),
            weight=TargetWeights(folder, config).output(dtype).to(device),
            eps=config.rms_norm_eps,
        )

    def restricted(self, token_ids: Tensor) -> TargetOutput:
        """The same over the ids `[Vd]` only."""
        return TargetOutput(self.norm, self.weight[token_ids].contiguous(), self.eps)

    def normed(self, states: Tensor) -> Tensor:
        """States after the final norm, `[T, H]`, from those before it."""
        return F.rms_norm(states, self.norm.shape, self.norm, self.eps)

    def logits(self, states: Tensor) -> Tensor:
        """Scores after each state before the final norm, `[T, H]` to `[T, V]`."""
        return F.linear(self.normed(states), self.weight)


class HeadLoader(Protocol[Head]):
    """See `HeadKind.load`."""

    def __call__(
        self, files: HeadFiles, target: TargetWeights, options: HeadOptions, dtype: torch.dtype, device: torch.device
    ) -> Head: ...


class NewWeights:
    """What a new head is made of: float32 tensors of the target, and noise.

    Args:
        compute_dtype: of tensors that are not trained.
        state_rms: root mean square of a typical last state before the final norm.
        device: of the head; what it is made of is read and drawn on the CPU, so that it is the same on every device.
    """

    def __init__(
        self,
        folder: Path,
        target: DecoderConfig,
        compute_dtype: torch.dtype,
        seed: int,
        state_rms: float = 1.0,
        device: torch.device = _CPU,
    ) -> None:
        self.target = target
        self.state_rms = state_rms
        self._compute_dtype = compute_dtype
        self._device = device
        self._shared = TargetWeights(folder, target)
        self._checkpoint = Checkpoint(folder)
        self._generator = torch.Generator().manual_seed(seed)

    def output(self) -> Tensor:
        """Output projection, `[V, H]`."""
        return self._shared.output(torch.float32)

    def final_norm(self) -> Tensor:
        """Weight of the final norm, `[H]`."""
        return self._checkpoint.read("model.norm.weight", (self.target.hidden_size,), torch.float32)

    def noise(self, *shape: int) -> Tensor:
        """Small and normal."""
        return torch.randn(shape, generator=self._generator) * _NOISE

    def last_layer(self) -> dict[str, Tensor]:
        """All tensors of the last decoder layer, named from within it."""
        return self.layer(self.target.num_layers - 1)

    def layer(self, index: int) -> dict[str, Tensor]:
        """All tensors of a decoder layer, counted from 0, named from within it."""
        prefix = f"model.layers.{index}."
        return {
            name.removeprefix(prefix): self._checkpoint.read(name, self._checkpoint.shape(name), torch.float32)
            for name in self._checkpoint.names
            if name.startswith(prefix)
        }

    def head(self, load: HeadLoader[Head], files: HeadFiles, frozen: Collection[str]) -> Head:
        """The head that files with this content hold, ready to be trained.

        Args:
            load: of the kind, see `HeadKind`.
            frozen: parameters that are the target's; these need no float32 copy.
        """
        head = load(files, self._shared, HeadOptions(), torch.float32, self._device)
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.data = parameter.data.to(self._compute_dtype)
        return head


def layer_config(target: DecoderConfig, num_layers: int = 1) -> dict[str, Any]:
    """Fields of a head's `config.json` that size it like layers of the target."""
    return {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_positions,
        **{name: target.raw[name] for name in _ROPE_FIELDS if target.raw.get(name) is not None},
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
