"""The `.heads` sidecar: one file with the draft head of one target.

Layout, little-endian: magic `TGMH`, version u32 (1), header length u32, JSON header, then the tensors as raw float32 in
the order of the header's entries, without gaps. The header holds `kind`, `heads` (how many draft heads), `base` (sizes
of the target), `entries` (`name` and `shape` of each tensor), and here also `config`, the kind's flat config.

The document that defined the format counts Medusa's heads from the token after the state, so its head 0 repeats the
target's own prediction. Files written here count from the token after that one and say so: `first_offset` is 2, and a
file without the field is read as the document has it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.models.checkpoint import lfs_hint
from eyas.models.head_files import HeadFiles
from eyas.models.mtp_layout import GLUE, SHARED_COPIES, MtpLayout, MtpTensors
from eyas.models.tensor_source import Renamed, StoredTensors, TensorSource

MAGIC, VERSION = b"TGMH", 1
PREFIX = struct.Struct("<4sII")
KINDS = ("eagle", "eagle3", "medusa", "mtp")
FIRST_OFFSET = 2
INTEGER_TENSORS = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}
MAX_EXACT_INTEGER = 1 << 24  # float32 holds every whole number below
_BASE = ("layers", "d_model", "heads", "ctx", "vocab")
_ITEM_BYTES = 4
# Names in a sidecar are the kind's own; the wiring is in its config.
_MTP = MtpLayout(
    format=".heads file",
    known_by=r"(?!)",
    prefix="",
    block="block.",
    names={name: name for name in (*GLUE, *SHARED_COPIES)},
    hidden_first=False,
    masks_first=False,
    feeds_back_norm=True,
)
_HEAD = re.compile(r"(blocks|lm_heads)\.(\d+)\.(.+)")


class HeadsTensors(StoredTensors):
    """Tensors of a `.heads` file, each read from its place when asked for."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], first_byte: int) -> None:
        super().__init__(path)
        self._shapes = dict(shapes)
        self._offsets: dict[str, int] = {}
        for name, shape in shapes.items():
            self._num_bytes[name] = _ITEM_BYTES * math.prod(shape)
            self._offsets[name] = first_byte
            first_byte += self._num_bytes[name]

    def _fetch(self, name: str, dtype: torch.dtype) -> Tensor:
        """Whole numbers are stored as float32, too."""
        shape = self._shapes[name]
        stored = np.fromfile(self.origin, "<f4", math.prod(shape), offset=self._offsets[name])
        tensor = torch.from_numpy(stored.astype(np.float32, copy=False)).view(shape)
        if not dtype.is_floating_point and not bool((tensor == tensor.round()).all()):
            raise ValueError(f"{self.origin}: tensor {name} must hold whole numbers")
        return tensor.to(dtype)


def open_heads_file(path: Path) -> HeadFiles | None:
    """The head in a `.heads` file, or None if it is something else.

    Raises:
        ValueError: naming what is wrong with the file or its header.
    """
    if path.suffix != ".heads" or not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(PREFIX.size)
        if prefix[: len(MAGIC)] != MAGIC:
            found = lfs_hint(path) or f"it begins with {prefix[: len(MAGIC)]!r}, expected {MAGIC!r}"
            raise ValueError(f"{path} is no .heads file: {found}")
        if len(prefix) < PREFIX.size:
            raise ValueError(f"{path} ends within its first {PREFIX.size} bytes; copy it again")
        _, version, header_bytes = PREFIX.unpack(prefix)
        if version != VERSION:
            raise ValueError(f"{path}: version {version} of the format is not supported, only {VERSION} is")
        first_byte = PREFIX.size + header_bytes
        if first_byte > size:
            raise ValueError(f"{path}: a header of {header_bytes} bytes does not fit into a file of {size}")
        header = _parse(path, file.read(header_bytes))
    shapes = _entries(path, header["entries"])
    expected = first_byte + _ITEM_BYTES * sum(math.prod(shape) for shape in shapes.values())
    if size != expected:
        what = "truncated" if size < expected else "longer than its entries"
        raise ValueError(f"{path} is {what}: it has {size} bytes, its header describes {expected}")
    tensors: TensorSource = HeadsTensors(path, shapes, first_byte)
    if header["kind"] == "medusa":
        tensors = _count_from_two(path, header, tensors)
    if header["kind"] == "mtp":
        _check_wiring(path, header["config"])
        tensors = MtpTensors(tensors, _MTP, 0)
    return HeadFiles(header["kind"], ".heads file", path, header["config"], tensors, header["base"])


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The header with every field checked but its entries."""
    try:
        header: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: the header is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: the header is not valid JSON: it is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header must be a JSON object, found {type(header).__name__}")
    for name in ("kind", "heads", "base", "entries"):
        if name not in header:
            raise ValueError(f"{path}: the header lacks {name}")
    if header["kind"] not in KINDS:
        raise ValueError(f"{path}: kind is {header['kind']!r}, expected one of {', '.join(KINDS)}")
    if not _is_positive(header["heads"]):
        raise ValueError(f"{path}: heads is {header['heads']!r}, expected a number of draft heads of at least 1")
    base = header["base"]
    if not isinstance(base, dict):
        raise ValueError(f"{path}: base must be a JSON object, found {type(base).__name__}")
    for name in _BASE:
        if not _is_positive(base.get(name)):
            raise ValueError(f"{path}: base.{name} is {base.get(name)!r}, expected a whole number of at least 1")
    config = header.get("config", {})
    if not isinstance(config, dict):
        raise ValueError(f"{path}: config must be a JSON object, found {type(config).__name__}")
    if header.get("first_offset", 1) not in (1, FIRST_OFFSET):
        raise ValueError(f"{path}: first_offset is {header['first_offset']!r}, expected 1 or {FIRST_OFFSET}")
    return header | {"base": {name: base[name] for name in _BASE}, "config": config}


def _entries(path: Path, entries: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the file's order."""
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: entries must be a list of tensors, at least one")
    shapes: dict[str, tuple[int, ...]] = {}
    for index, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{path}: entry {index} has no name")
        shape = entry.get("shape")
        if not isinstance(shape, list) or not all(_is_positive(length) for length in shape):
            raise ValueError(f"{path}: the shape of {name} is {shape!r}, expected a list of numbers of at least 1")
        if name in shapes:
            raise ValueError(f"{path}: the entry {name} occurs twice")
        shapes[name] = tuple(shape)
    return shapes


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_wiring(path: Path, config: dict[str, Any]) -> None:
    """Raise `ValueError` unless an MTP module's config says what its own format implies."""
    if not isinstance(config.get("block"), dict):
        raise ValueError(f"{path}: config.block must be the config of the module's decoder layer, a JSON object")
    for name in ("hidden_first", "masks_first", "feeds_back_norm"):
        if not isinstance(config.get(name), bool):
            raise ValueError(f"{path}: config.{name} is {config.get(name)!r}, expected true or false")


def _count_from_two(path: Path, header: dict[str, Any], tensors: TensorSource) -> TensorSource:
    """Medusa's tensors with head 0 foretelling the token after next; the head before it is dropped."""
    found = {int(match[2]) for name in tensors.names if (match := _HEAD.fullmatch(name))}
    if len(found) != header["heads"]:
        raise ValueError(f"{path}: heads is {header['heads']}, but the entries are of {len(found)} heads")
    shift = FIRST_OFFSET - header.get("first_offset", 1)
    if not shift:
        return tensors
    if len(found) == 1:
        raise ValueError(f"{path}: its only head repeats the target's own prediction; nothing is left to draft with")
    names = {}
    for name in tensors.names:
        match = _HEAD.fullmatch(name)
        if match is None:
            names[name] = name
        elif int(match[2]) >= shift:
            names[f"{match[1]}.{int(match[2]) - shift}.{match[3]}"] = name
    return Renamed(tensors, names)
