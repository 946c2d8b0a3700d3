"""Writing heads in published formats, from the tensors of any format that can be read.

A file or folder appears whole or not at all: it is written beside its place and renamed. Nothing here makes a module.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.acceptance_prior import FIELD, AcceptancePrior
from eyas.models.candidate_projection import CANDIDATE_TENSORS
from eyas.models.config import DecoderConfig, read_json
from eyas.models.head_files import HeadFiles, HeadOptions, base_of
from eyas.models.head_loading import normalise_head
from eyas.models.heads_file import FIRST_OFFSET, INTEGER_TENSORS, MAGIC, MAX_EXACT_INTEGER, PREFIX, VERSION
from eyas.models.medusa_config import SHARED_PROJECTION, TOKEN_MAP, MedusaConfig
from eyas.models.mtp_tensors import module_of
from eyas.models.target_weights import TargetWeights
from eyas.models.tensor_source import read_tensors
from eyas.models.whole_files import save_whole

_NOT_IN_EAGLE1_FOLDERS = ("norm.weight", "lm_head.weight")  # speculators has both, see `open_eagle_folder`


def write_heads_file(path: Path, files: HeadFiles, target: DecoderConfig) -> None:
    """Write a head of any kind as a `.heads` file, see `models.heads_file`.

    Raises:
        ValueError: naming the field or tensor, if the head does not fit the target or cannot be stored exactly.
    """
    if files.kind == "mtp":
        files = module_of(files)
    config = normalise_head(files, target)
    if path.suffix != ".heads":
        raise ValueError(f"{path} must end in .heads, by which such a file is known")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    source = files.tensors
    header: dict[str, Any] = {
        "kind": files.kind,
        "heads": config.num_heads if isinstance(config, MedusaConfig) else 1,
        "base": base_of(target),
        "config": files.config,
        "entries": [{"name": name, "shape": list(source.shape(name))} for name in source.names],
    }
    if files.kind == "medusa":
        header["first_offset"] = FIRST_OFFSET
    encoded = json.dumps(header).encode()
    with _appearing(path) as written, written.open("wb") as file:
        file.write(PREFIX.pack(MAGIC, VERSION, len(encoded)) + encoded)
        for name in source.names:
            tensor = _read(files, name)
            if name in INTEGER_TENSORS and int(tensor.long().abs().max()) >= MAX_EXACT_INTEGER:
                raise ValueError(
                    f"{source.origin}: tensor {name} holds a number of {MAX_EXACT_INTEGER} or more, which a .heads "
                    "file cannot store exactly; use another format"
                )
            file.write(tensor.float().contiguous().numpy().astype("<f4", copy=False).tobytes())


def write_eagle_folder(path: Path, files: HeadFiles, target: DecoderConfig) -> None:
    """Write an EAGLE-1 or EAGLE-3 head as the folder its authors publish: `config.json` and `model.safetensors`.

    Raises:
        ValueError: for another kind, or for a variant of EAGLE-1 that its authors' folder has no place for.
    """
    if files.kind not in ("eagle", "eagle3"):
        raise ValueError(f"format: a head of kind {files.kind} has no EAGLE folder; use heads")
    normalise_head(files, target)
    for name in _NOT_IN_EAGLE1_FOLDERS:
        if files.kind == "eagle" and name in files.tensors.names:
            raise ValueError(f"format: an EAGLE-1 folder has no place for {name}, by which EAGLE-3 is known; use heads")
    tensors = {name: _read(files, name) for name in files.tensors.names}
    _write_folder(path, "model.safetensors", files.config, tensors)


def write_vllm_eagle3_folder(path: Path, files: HeadFiles, target: DecoderConfig) -> None:
    """Write an EAGLE-3 head as vLLM loads it: without the factors that find candidates, which it does not know.

    The factors only say which rows of the output projection are read; the head proposes nearly the same without them.
    The acceptance prior goes with them, as it was fitted to scores over the candidates.

    Raises:
        ValueError: for another kind.
    """
    if files.kind != "eagle3":
        raise ValueError(
            f"format: the vllm layout is for medusa and eagle3 heads, not {files.kind}; use folder or heads"
        )
    normalise_head(files, target)
    names = [name for name in files.tensors.names if name not in CANDIDATE_TENSORS]
    has_factors = len(names) < len(files.tensors.names)
    left_out = ("num_candidates", FIELD) if has_factors else ()
    fields = {name: value for name, value in files.config.items() if name not in left_out}
    fields["architectures"] = ["LlamaForCausalLMEagle3"]
    _write_folder(path, "model.safetensors", fields, {name: _read(files, name) for name in names})


def write_medusa_folder(path: Path, files: HeadFiles, target: DecoderConfig) -> None:
    """Write Medusa heads as their authors do: `medusa_lm_head.safetensors` and `config.json`.

    Raises:
        ValueError: for what that layout has no place for.
    """
    config = _medusa_config(files, target)
    for name in (TOKEN_MAP, SHARED_PROJECTION):
        if name in files.tensors.names:
            raise ValueError(f"format: a Medusa folder of the authors' layout has no place for {name}; use vllm")
    if config.logit_scale != 1.0:
        raise ValueError("format: a Medusa folder of the authors' layout has no place for logit_scale; use vllm")
    tensors = {_authors_name(name, config): _read(files, name) for name in files.tensors.names}
    fields = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, **_carried(files)}
    _write_folder(path, "medusa_lm_head.safetensors", fields, tensors)


def write_vllm_medusa_folder(path: Path, files: HeadFiles, target: TargetWeights) -> None:
    """Write Medusa heads as vLLM reads them; it takes no projection from the target, so that one is written, too."""
    config = _medusa_config(files, target.config)
    tensors = {name: _read(files, name) for name in files.tensors.names}
    if config.projection == "target":
        tensors[SHARED_PROJECTION] = target.output(torch.float32)
    if SHARED_PROJECTION in tensors:
        tensors["lm_heads.0.weight"] = tensors.pop(SHARED_PROJECTION)
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.has_bias,
        "original_lm_head": config.projection != "own",
        "logit_scale": config.logit_scale,
        **_carried(files),
    }
    _write_folder(path, "model.safetensors", fields, tensors)


def with_prior(files: HeadFiles, prior: AcceptancePrior) -> HeadFiles:
    """The same head with another acceptance prior."""
    return replace(files, config=files.config | {FIELD: prior.as_json()})


def save_prior(folder: Path, prior: AcceptancePrior) -> None:
    """Put an acceptance prior into the `config.json` of a head's folder, in place of any that is there."""
    file = folder / "config.json"
    config = read_json(file) | {FIELD: prior.as_json()}
    with _appearing(file) as written:
        written.write_text(json.dumps(config, indent=2) + "\n")


def save_folder(folder: Path, file_name: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put tensors, in the types they have, and `config.json` into a folder, over what is there of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_whole(contiguous, folder / file_name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _carried(files: HeadFiles) -> dict[str, Any]:
    """Fields of Medusa heads that no tensor tells."""
    return {name: files.config[name] for name in ("base_model_name_or_path", FIELD) if name in files.config}


def _medusa_config(files: HeadFiles, target: DecoderConfig) -> MedusaConfig:
    if files.kind != "medusa":
        raise ValueError(f"format: a head of kind {files.kind} has no Medusa folder; use folder or heads")
    files.check_base(target)
    return MedusaConfig.normalise(files, target, HeadOptions())


def _authors_name(name: str, config: MedusaConfig) -> str:
    """`blocks.1.layers.0.bias` as `1.0.linear.bias`, `lm_heads.1.weight` as `1.1.weight` after one block."""
    parts = name.split(".")
    if parts[0] == "lm_heads":
        return f"{parts[1]}.{config.num_layers}.weight"
    return f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "blocks" else name


def _read(files: HeadFiles, name: str) -> Tensor:
    """A tensor in float32, or as the integers it holds, checked to be finite."""
    dtype = INTEGER_TENSORS.get(name, torch.float32)
    return read_tensors(files.tensors, {name: files.tensors.shape(name)}, dtype)[name]


def _narrowest(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All floating-point tensors in the narrowest type that holds every one of them exactly."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in floats):
            return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    return tensors


def _write_folder(path: Path, file_name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; give another name")
    with _appearing(path) as folder:
        save_folder(folder, file_name, config, _narrowest(tensors))


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A place beside `path` that is renamed to it at the end, or removed if there was an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield written
        os.replace(written, path)
    except BaseException:
        if written.is_dir():
            shutil.rmtree(written)
        else:
            written.unlink(missing_ok=True)
        raise
