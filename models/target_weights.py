"""The tensors of a target that draft heads share: its embedding and its output projection."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig

_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
               "language_model.model.embed_tokens.weight")  # fmt: skip
_OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight")


class TargetWeights:
    """Reads single tensors of a target folder, whatever its architecture calls them."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self.folder = folder
        self.config = config
        self._checkpoint = Checkpoint(folder)

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """Input embedding `[V, H]`."""
        return self._read(_EMBEDDINGS, dtype)

    def output(self, dtype: torch.dtype) -> Tensor:
        """Output projection `[V, H]`; the embedding where the two are tied."""
        if self.config.tie_word_embeddings:
            return self.embedding(dtype)
        return self._read(_OUTPUTS, dtype)

    def _read(self, names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        name = next((name for name in names if name in self._checkpoint), names[0])
        return self._checkpoint.read(name, (self.config.vocab_size, self.config.hidden_size), dtype)
