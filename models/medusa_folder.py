"""The files Medusa heads are published in: their authors' `medusa_lm_head.*`, Medusa-2 models, and vLLM's folders.

Authors name tensors by position in a list of lists: `{head}.{block}.linear.weight`, and `{head}.{blocks}.weight` for
the projection after the last block. vLLM names them `blocks.{head}.layers.{block}.weight` and `lm_heads.{head}.weight`;
its names are the kind's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eyas.models.acceptance_prior import FIELD
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import read_json
from eyas.models.head_files import HeadFiles
from eyas.models.medusa_config import SHARED_PROJECTION
from eyas.models.tensor_source import Renamed, TensorSource

_PREFIX = r"(?:medusa_heads?\.)?"
_AUTHORS = re.compile(_PREFIX + r"(\d+)\.(\d+)\.(?:linear\.(weight|bias)|weight)")
_VLLM = re.compile(_PREFIX + r"((?:blocks\.\d+\.layers\.\d+\.(?:weight|bias))|(?:lm_heads\.\d+\.weight)|token_map)")
_IN_TARGET = "medusa_head."
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_lm_head.bin")
_SUFFIXES = (".safetensors", ".pt", ".bin")
# What else a Medusa config says is in the tensors, where it is right more often.
_FIELDS = ("vocab_size", "logit_scale", "base_model_name_or_path", FIELD)
_SHARED_IN_VLLM = "lm_heads.0.weight"


def open_medusa(path: Path) -> HeadFiles | None:
    """The Medusa heads in a file, in a folder of their own, or in their target's; None if there are none.

    Raises:
        ValueError: if the files are damaged, or named after Medusa but hold something else.
    """
    if path.is_file():
        return _open_file(path, path) if path.suffix in _SUFFIXES else None
    file = next((path / name for name in _FILES if (path / name).exists()), None)
    if file is not None:
        return _open_file(path, file)
    if not (path / "config.json").exists():
        return None
    raw = read_json(path / "config.json")
    if raw.get("model_type") == "medusa":
        return _files(path, Checkpoint(path), raw)
    return _open_target(path, raw)


def _open_file(path: Path, file: Path) -> HeadFiles | None:
    """A weight file, with the config beside it if that one is of Medusa."""
    source = Checkpoint(file)
    is_named = file.name in _FILES
    if not is_named and not any(_AUTHORS.fullmatch(name) or _VLLM.fullmatch(name) for name in source.names):
        return None
    config = file.parent / "config.json"
    raw = read_json(config) if config.exists() else {}
    is_of_medusa = raw.get("model_type") == "medusa" or any(name.startswith("medusa_") for name in raw)
    return _files(path, source, raw if is_of_medusa else {})


def _open_target(path: Path, raw: dict[str, Any]) -> HeadFiles | None:
    """The heads of a Medusa-2 model, which lie in the same files as the model they were trained with.

    A folder of heads alone whose weight file is not called as the authors call it is found here, too.
    """
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / index).exists():
            if not any(str(name).startswith(_IN_TARGET) for name in read_json(path / index).get("weight_map", {})):
                return None
            break
    else:
        # Pickles are read whole, so only a config that names Medusa is worth it.
        if not any(path.glob("*.safetensors")) and "medusa_num_heads" not in raw:
            return None
    source = Checkpoint(path)
    if not any(name.startswith(_IN_TARGET) for name in source.names):
        is_alone = "medusa_num_heads" in raw and any(_AUTHORS.fullmatch(name) for name in source.names)
        return _files(path, source, raw) if is_alone else None
    own = Renamed(source, {name: name for name in source.names if name.startswith(_IN_TARGET)})
    config = {FIELD: raw[FIELD]} if FIELD in raw else {}
    return HeadFiles("medusa", "Medusa-2 model", path, config, Renamed(own, _authors_names(own)))


def _files(path: Path, source: TensorSource, raw: dict[str, Any]) -> HeadFiles:
    config = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
    if any(_AUTHORS.fullmatch(name) for name in source.names):
        # Their configs hold no vocabulary; one that is there comes from a default of the library that wrote it.
        config.pop("vocab_size", None)
        return HeadFiles("medusa", "Medusa heads", path, config, Renamed(source, _authors_names(source)))
    names = _unique(source, ((m[1] if (m := _VLLM.fullmatch(name)) else name, name) for name in source.names))
    has_others = any(name.startswith("lm_heads.") for name in names if name != _SHARED_IN_VLLM)
    has_others |= not any(name.startswith("blocks.1.") for name in names)
    if raw.get("original_lm_head") and _SHARED_IN_VLLM in names and not has_others:
        names[SHARED_PROJECTION] = names.pop(_SHARED_IN_VLLM)
    return HeadFiles("medusa", "Medusa folder of vLLM", path, config, Renamed(source, names))


def _authors_names(source: TensorSource) -> dict[str, str]:
    """The kind's names to the authors'.

    Raises:
        ValueError: if a head's projection is not the one after its last block. Blocks that share their weights are
            saved once by some libraries; whether those left out are copies cannot be told.
    """
    num_blocks: dict[str, int] = {}
    for found in source.names:
        if (match := _AUTHORS.fullmatch(found)) is not None and match[3] is not None:
            num_blocks[match[1]] = max(num_blocks.get(match[1], 0), int(match[2]) + 1)
    pairs = []
    for found in source.names:
        match = _AUTHORS.fullmatch(found)
        if match is None:
            pairs.append((found, found))  # refused by name when the head is loaded
        elif match[3] is None:
            if int(match[2]) != num_blocks.get(match[1], int(match[2])):
                raise ValueError(
                    f"{source.origin}: tensor {found} is a projection after {match[2]} residual blocks, but head "
                    f"{match[1]} has {num_blocks[match[1]]}; export every block, also those that share their weights"
                )
            pairs.append((f"lm_heads.{match[1]}.weight", found))
        else:
            pairs.append((f"blocks.{match[1]}.layers.{match[2]}.{match[3]}", found))
    return _unique(source, pairs)


def _unique(source: TensorSource, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Pairs of the kind's name and the file's; raises `ValueError` where two tensors would get one name."""
    names: dict[str, str] = {}
    for name, found in pairs:
        if name in names:
            raise ValueError(f"{source.origin}: tensors {names[name]} and {found} are the same one by name")
        names[name] = found
    return names
