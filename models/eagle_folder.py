"""The folders that the EAGLE authors, lmsys, SpecForge and others publish: a flat `config.json` beside weight files.

EAGLE-1 and EAGLE-3 folders carry the same architecture names, so their tensors tell which of the two one holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import read_json
from eyas.models.head_files import HeadFiles
from eyas.models.tensor_source import Renamed

_HIDDEN_NORM, _QUERY = "layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"
_ONLY_EAGLE3 = (_HIDDEN_NORM, "norm.weight", "lm_head.weight", "d2t", "t2d")
# Fields of other heads' configs: their weight files are left to those who can read them.
_OTHER_HEADS = ("speculators_model_type", "medusa_num_heads")


def open_eagle_folder(path: Path) -> HeadFiles | None:
    """The EAGLE head in a folder, or None if it holds something else.

    Raises:
        ValueError: if its tensors are neither those of EAGLE-1 nor of EAGLE-3.
    """
    if not (path / "config.json").exists():
        return None
    config = read_json(path / "config.json")
    if any(config.get(field) is not None for field in _OTHER_HEADS) or config.get("model_type") == "medusa":
        return None
    checkpoint = Checkpoint(path)
    names = common_names(checkpoint)
    if not {"fc.weight", _HIDDEN_NORM} & names.keys():
        return None
    kind = _kind(path, config, Renamed(checkpoint, names))
    if kind == "eagle3":
        return HeadFiles("eagle3", "EAGLE-3 folder", path, config, Renamed(checkpoint, with_midlayer(names)))
    return HeadFiles("eagle", "EAGLE-1 folder", path, config, Renamed(checkpoint, names))


def common_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names with every layer as `layers.N` and without the prefix some put before them, to the names in the file.

    Raises:
        ValueError: if two tensors of the file would get one name.
    """
    names: dict[str, str] = {}
    for found in checkpoint.names:
        name = found.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name.startswith("additional_layers."):
            index, _, rest = name.removeprefix("additional_layers.").partition(".")
            name = f"layers.{int(index) + 1}.{rest}" if index.isdigit() else name
        if name in names:
            raise ValueError(f"{checkpoint.origin}: tensors {names[name]} and {found} are the same one by name")
        names[name] = found
    return names


def with_midlayer(names: dict[str, str]) -> dict[str, str]:
    """The same with the first layer called as its authors call it in EAGLE-3."""
    first = "layers.0."
    return {("midlayer." + n.removeprefix(first) if n.startswith(first) else n): names[n] for n in names}


def _kind(path: Path, config: dict[str, Any], tensors: Renamed) -> str:
    """`eagle` or `eagle3`, by the width of the first layer's query projection and by what only one of them has."""
    hidden = tensors.shape(_HIDDEN_NORM if _HIDDEN_NORM in tensors else "fc.weight")[0]
    query_width = tensors.shape(_QUERY)[-1] if _QUERY in tensors else None
    found = [name for name in _ONLY_EAGLE3 if name in tensors]
    if query_width == 2 * hidden and found:
        return "eagle3"
    if query_width == hidden and not found and tensors.shape("fc.weight")[-1] == 2 * hidden:
        return "eagle"
    width = f"fc.weight is {list(tensors.shape('fc.weight'))}" if "fc.weight" in tensors else "there is no fc.weight"
    raise ValueError(
        f"{path}: neither EAGLE-1 (fc [H, 2H], first query projection [., H], none of {', '.join(_ONLY_EAGLE3)}) nor "
        f"EAGLE-3 (first query projection [., 2H] and those tensors): {width}, the query projection reads "
        f"{query_width}, and of those tensors it holds {', '.join(found) or 'none'}"
    )
