"""The folders that vLLM's `speculators` library saves: layer options nested in `config.json`, names of their own.

The library drops fields at their default when it saves a layer's config, so defaults are filled in from the class of
its model type. `norm_before_residual` is false when missing, as in the library's own config class, by which the head
was trained; vLLM's loader takes true instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from eyas.models.acceptance_prior import FIELD
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import read_json
from eyas.models.eagle_folder import common_names, with_midlayer
from eyas.models.head_files import HeadFiles
from eyas.models.tensor_source import Renamed

_REFUSED = {
    "peagle": "it drafts all its tokens in parallel from mask tokens, which Eyas does not do",
    "dflash": "it drafts blocks by diffusion, which Eyas does not do",
    "dspark": "it drafts blocks by diffusion, which Eyas does not do",
}
_TOP_LEVEL = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
              "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "layernorms", "fusion_bias",
              "num_nextn_predict_layers", "logit_scale", FIELD)  # fmt: skip
# Copies of the target's weights that only the training loss reads.
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
_EAGLE_NAMES = {
    "fusion_fc.weight": "fc.weight",
    "fusion_fc.bias": "fc.bias",
    "post_embedding_layernorm.weight": "embedding_layernorm.weight",
    "pre_lm_head_layernorm.weight": "norm.weight",
}


def open_speculators_folder(path: Path) -> HeadFiles | None:
    """The head in a speculators folder, or None if it holds something else.

    Raises:
        ValueError: for a kind of head that Eyas does not run.
    """
    if not (path / "config.json").exists():
        return None
    saved = read_json(path / "config.json")
    kind = saved.get("speculators_model_type")
    if kind is None:
        return None
    if kind in _REFUSED:
        raise ValueError(f"speculators_model_type: {kind} is not supported: {_REFUSED[kind]}")
    if kind not in ("eagle3", "eagle", "mtp"):
        raise ValueError(f"speculators_model_type: {kind} is not supported; eagle3, eagle and mtp are")
    config, checkpoint = flat_config(saved), Checkpoint(path)
    label = f"speculators {kind} folder"
    if kind == "mtp":
        return HeadFiles("mtp", label, path, config, checkpoint)
    names = {name: found for name, found in common_names(checkpoint).items() if name not in _TRAINING_ONLY}
    if kind == "eagle3":
        return HeadFiles("eagle3", label, path, config, Renamed(checkpoint, with_midlayer(names)))
    tensors = Renamed(checkpoint, {_eagle_name(name): found for name, found in names.items()})
    for option, name in (("layernorms", "norm.weight"), ("fusion_bias", "fc.bias")):
        if config.get(option) is not None and bool(config[option]) != (name in tensors):
            raise ValueError(
                f"{option}: is {config[option]} in config.json, but {name} is {'in' if name in tensors else 'not in'} "
                f"{path}; make the two agree"
            )
    return HeadFiles("eagle", label, path, config, tensors)


def flat_config(saved: dict[str, Any]) -> dict[str, Any]:
    """Layer options, completed, below the head's own, with the library's reading of layer ids made explicit.

    Raises:
        ValueError: naming the field that is missing or unknown.
    """
    layer = saved.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") is None:
        raise ValueError("transformer_layer_config: is missing from config.json, or its model_type is")
    if layer["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"transformer_layer_config.model_type: {layer['model_type']} is not known to transformers")
    complete = CONFIG_MAPPING[layer["model_type"]](**layer).to_dict()
    own = {name: saved[name] for name in _TOP_LEVEL if saved.get(name) is not None}
    return {**complete, **own, "layer_ids_count_states": True}


def _eagle_name(name: str) -> str:
    """The EAGLE authors' name of a tensor; the layer is called `transformer` here."""
    if name.startswith("transformer."):
        return "layers.0." + name.removeprefix("transformer.")
    return _EAGLE_NAMES.get(name, name)
