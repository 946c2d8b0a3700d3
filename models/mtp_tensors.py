"""MTP modules as their authors publish them, inside a target's own checkpoint or beside it, under one set of names.

A module is `enorm`, `hnorm` and `eh_proj` (DeepSeek's names for the norms of embedding and hidden state and for the
projection of both), a decoder layer `block.*`, a final `norm`, and in some files copies of the target's embedding and
output projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.checkpoint import Checkpoint, TensorSource, read_tensors
from eyas.models.config import read_json, require_fields
from eyas.models.head_files import HeadFiles

GLUE = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight")
SHARED_COPIES = ("embed_tokens.weight", "head.weight")
_MODULE_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How one family names its modules and wires them.

    Args:
        format: for people.
        known_by: pattern of a tensor that only an MTP module has; its group is the module's index.
        prefix: of every tensor of a module, `{}` standing for the index.
        block: what follows the prefix in the decoder layer's tensors.
        names: what follows it in the others, to the names used here.
        hidden_first: `eh_proj` reads [hidden, embedding], not [embedding, hidden].
        masks_first: the embedding of the pair at position 0 is zero.
        feeds_back_norm: the state that stands in for a target feature at drafted tokens is taken after `norm`.
    """

    format: str
    known_by: str
    prefix: str
    block: str
    names: dict[str, str]
    hidden_first: bool
    masks_first: bool
    feeds_back_norm: bool


# Where a drafted token's state is taken: after the norm throughout, since every module is trained on features of the
# target after its final norm, so that its own normed state is the nearest to what it has seen. MiMo, Qwen and
# speculators train or run it so. For DeepSeek's naming SGLang and transformers do too, vLLM takes it before.
DEEPSEEK = MtpLayout(
    format="MTP module in a DeepSeek-style checkpoint",
    known_by=r"model\.layers\.(\d+)\.(?:enorm|hnorm|eh_proj|shared_head\.norm|shared_head\.head)\.",
    prefix="model.layers.{}.",
    block="",
    names={
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "shared_head.norm.weight": "norm.weight",
        "shared_head.head.weight": "head.weight",
        "embed_tokens.weight": "embed_tokens.weight",
    },
    hidden_first=False,
    masks_first=True,
    feeds_back_norm=True,
)
QWEN = MtpLayout(
    format="MTP module in a Qwen3-Next-style checkpoint",
    known_by=r"mtp\.(?:layers\.(\d+)|fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.",
    prefix="mtp.",
    block="layers.{}.",
    names={
        "pre_fc_norm_embedding.weight": "enorm.weight",
        "pre_fc_norm_hidden.weight": "hnorm.weight",
        "fc.weight": "eh_proj.weight",
        "norm.weight": "norm.weight",
    },
    hidden_first=False,
    masks_first=False,
    feeds_back_norm=True,
)
_LAYERNORMS = {
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "input_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "norm.weight",
}
MIMO = MtpLayout(
    format="MTP module in a MiMo checkpoint",
    known_by=r"model\.mtp_layers\.(\d+)\.",
    prefix="model.mtp_layers.{}.",
    block="",
    names=_LAYERNORMS,
    hidden_first=True,
    masks_first=True,
    feeds_back_norm=True,
)
# The names of MiMo, the wiring of Qwen (speculators, `models/mtp`). Its early versions joined [hidden, embedding]; only
# those ran layers of Qwen2, see `module_of`.
SPECULATORS = MtpLayout(
    format="speculators MTP folder",
    known_by=r"mtp_layers\.(\d+)\.",
    prefix="mtp_layers.{}.",
    block="",
    names=_LAYERNORMS,
    hidden_first=False,
    masks_first=False,
    feeds_back_norm=True,
)
# Copies that the library freezes in training, so that the target's own are the same.
_COPIES_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_IN_CHECKPOINTS = (DEEPSEEK, QWEN, MIMO)


class MtpTensors:
    """One module's tensors out of a checkpoint; errors carry the names in the file.

    Args:
        index: of the module, as the layout counts.
    """

    def __init__(self, source: TensorSource, layout: MtpLayout, index: int) -> None:
        self.origin = source.origin
        self._source = source
        self._prefix = layout.prefix.format(index)
        self._block = layout.block.format(index)
        self._own_names = {name: own for own, name in layout.names.items()}
        self._names = [
            self._name_of(name.removeprefix(self._prefix), layout)
            for name in source.names
            if name.startswith(self._prefix) and _index_of(name, layout) in (None, index)
        ]

    def _name_of(self, own: str, layout: MtpLayout) -> str:
        if own in layout.names:
            return layout.names[own]
        return f"block.{own.removeprefix(self._block)}" if own.startswith(self._block) else own

    @property
    def names(self) -> list[str]:
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def file_name(self, name: str) -> str:
        """What the file calls a tensor."""
        if name.startswith("block."):
            return self._prefix + self._block + name.removeprefix("block.")
        return self._prefix + self._own_names.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self.file_name(name))

    def num_bytes(self, name: str) -> int:
        return self._source.num_bytes(self.file_name(name))

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Checkpoint.read`."""
        return self._source.read(self.file_name(name), shape, dtype)

    def read_all(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
        """See `read_tensors`."""
        in_file = read_tensors(self._source, {self.file_name(name): shape for name, shape in shapes.items()}, dtype)
        return dict(zip(shapes, in_file.values(), strict=True))


def open_mtp_checkpoint(path: Path) -> HeadFiles | None:
    """The MTP module in a folder, its target's own or one beside it; None if there is none.

    Raises:
        ValueError: naming what is wrong with the modules that there are.
    """
    if not (path / "config.json").exists():
        return None
    names, raw = _weight_names(path), read_json(path / "config.json")
    if "speculators_model_type" in raw:
        return None
    block = raw.get("text_config") or raw
    layout = next((layout for layout in _IN_CHECKPOINTS if _indices(names, layout)), None)
    if layout is None:
        promised = next((name for name in _MODULE_COUNTS if block.get(name)), None)
        if promised is not None and any(name.startswith("model.layers.0.") for name in names):
            raise ValueError(
                f"{path}: {promised} is {block[promised]}, but no tensor of an MTP module is there; use the checkpoint "
                "as its authors published it"
            )
        return None
    return mtp_files(path, layout, block, Checkpoint(path))


def mtp_files(path: Path, layout: MtpLayout, block: dict[str, Any], source: TensorSource) -> HeadFiles:
    """The module of a checkpoint in a known layout.

    Args:
        block: the config of its decoder layer, as `transformers` reads it: usually the target's.

    Raises:
        ValueError: for FP8 weights, for modules beyond the first, and for one in the wrong place.
    """
    indices = _indices(source.names, layout)
    first = 0
    if layout is DEEPSEEK:
        require_fields(block, "num_hidden_layers")
        first = int(block["num_hidden_layers"])
    if first not in indices:
        raise ValueError(
            f"{path}: the MTP module is expected at {layout.prefix.format(first)}, found at index "
            f"{', '.join(map(str, indices)) or 'none'}"
        )
    declared = next((name for name in _MODULE_COUNTS if block.get(name) is not None), _MODULE_COUNTS[0])
    # The second module reads the first one's state of the position before, which a drafter does not keep from step to
    # step, and has no pair at position 0, where its attention would find whatever the slot held before.
    if len(indices) > 1 and block.get(declared) != 1:
        raise ValueError(
            f"{path}: {len(indices)} MTP modules are there, only one is supported; set {declared} to 1 in its "
            "config.json to draft with the first alone"
        )
    tensors = MtpTensors(source, layout, first)
    scales = sorted(name for name in tensors.names if name.endswith(("weight_scale_inv", "weight_scale")))
    if scales:
        raise ValueError(
            f"{path}: tensor {tensors.file_name(scales[0])} scales FP8 weights, which are not supported; convert the "
            "checkpoint to bfloat16"
        )
    config = {
        "block": block,
        "hidden_first": layout.hidden_first,
        "masks_first": layout.masks_first,
        "feeds_back_norm": layout.feeds_back_norm,
    }
    return HeadFiles("mtp", layout.format, path, config, tensors)


def module_of(files: HeadFiles) -> HeadFiles:
    """An MTP head whose format left its names as `speculators` writes them, under the names used here.

    Raises:
        ValueError: see `mtp_files`; or naming a tensor of neither the module nor the target.
    """
    if isinstance(files.tensors, MtpTensors):
        return files
    for name in sorted(files.tensors.names):
        if not name.startswith("mtp_layers.") and name not in _COPIES_OF_THE_TARGET and not name.endswith("inv_freq"):
            raise ValueError(f"{files.path}: tensor {name} belongs to a variant of MTP that is not supported")
    layout = replace(SPECULATORS, hidden_first=files.config.get("model_type") == "qwen2")
    return mtp_files(files.path, layout, files.config, files.tensors)


def _indices(names: Iterable[str], layout: MtpLayout) -> list[int]:
    found = {_index_of(name, layout, unnumbered=0) for name in names}
    return sorted(index for index in found if index is not None)


def _index_of(name: str, layout: MtpLayout, unnumbered: int | None = None) -> int | None:
    """Index of the module that a tensor shows to exist; `unnumbered` if it is one that all modules share."""
    match = re.match(layout.known_by, name)
    if match is None:
        return None
    return unnumbered if match[1] is None else int(match[1])


def _weight_names(path: Path) -> list[str]:
    """Names in a folder's safetensors, without opening them where an index lists them; MTP comes in no other files."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return list(read_json(index).get("weight_map", {}))
    return Checkpoint(path).names if any(path.glob("*.safetensors")) else []
