"""From a target's folder to its decoder, whichever implementation serves its architecture."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.models.config import DecoderConfig
from eyas.models.decoder import Decoder
from eyas.models.linear import pack_linears
from eyas.models.llama import load_decoder
from eyas.models.parallel import TensorParallel
from eyas.models.transformers_decoder import load_transformers_decoder


def load_target_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device, parallel: TensorParallel | None = None
) -> Decoder:
    """Load one rank of the target in a Hugging Face safetensors folder, natively where its architecture is known.

    Its linear layers are packed for inference.

    Raises:
        ValueError: naming the field or tensor that is wrong, or what the architecture has that cannot be served.
    """
    parallel = parallel or TensorParallel()
    config = DecoderConfig.from_folder(folder)
    config.check_tensor_parallel(parallel.size)
    if config.is_native:
        native = load_decoder(folder, dtype, device, parallel)
        pack_linears(native)
        return native
    return load_transformers_decoder(folder, config, dtype, device)
