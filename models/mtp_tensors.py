"""MTP modules as their authors publish them, inside a target's own checkpoint or beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.models.acceptance_prior import FIELD
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import read_json, require_fields
from eyas.models.head_files import HeadFiles
from eyas.models.mtp_layout import MtpLayout, MtpTensors, module_indices
from eyas.models.tensor_source import TensorSource

_MODULE_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")

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
    if FIELD in raw:
        block = block | {FIELD: raw[FIELD]}
    layout = next((layout for layout in _IN_CHECKPOINTS if module_indices(names, layout)), None)
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
    indices = module_indices(source.names, layout)
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
        "block": {name: value for name, value in block.items() if name != FIELD},
        "hidden_first": layout.hidden_first,
        "masks_first": layout.masks_first,
        "feeds_back_norm": layout.feeds_back_norm,
    }
    if FIELD in block:
        config[FIELD] = block[FIELD]
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


def _weight_names(path: Path) -> list[str]:
    """Names in a folder's safetensors, without opening them where an index lists them; MTP comes in no other files."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return list(read_json(index).get("weight_map", {}))
    return Checkpoint(path).names if any(path.glob("*.safetensors")) else []
