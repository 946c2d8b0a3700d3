"""Writing a safetensors file that appears complete or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_whole(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors beside `file` and rename; what a killed run left is written over.

    Raises:
        OSError: naming the file, such as where the disk is full; nothing is left then.
    """
    partial = file.with_suffix(".partial")
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode  # safetensors would let the owner alone read it, whatever the umask says
        save_file(dict(tensors), partial, metadata=metadata)
        partial.chmod(mode)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{file} cannot be written: {error}") from error
    partial.replace(file)
