"""Vocabularies that a draft head does not share with its target: maps in its files, and lists the user brings.

Letters: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.tensor_source import TensorSource


def read_vocabulary_map(source: TensorSource, size: int, target_size: int) -> Tensor:
    """Offsets `d2t`, int64 `[Vd]`: draft id j stands for target id j + d2t[j].

    Heads over the whole vocabulary are published without maps, or with both maps zero.

    Args:
        size: Vd.
        target_size: V, without padding.

    Raises:
        ValueError: if the map is missing, does not ascend, leaves the vocabulary, or disagrees with `t2d`.
    """
    if "d2t" not in source.names:
        if size != target_size:
            raise ValueError(
                f"{source.origin}: tensor d2t is missing, but draft_vocab_size is {size}, not {target_size}"
            )
        return torch.zeros(size, dtype=torch.int64)
    offsets = source.read("d2t", (size,), torch.int64)
    ids = torch.arange(size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= target_size or bool((ids.diff() <= 0).any()):
        raise ValueError(f"{source.origin}: d2t must map to strictly increasing ids below {target_size}")
    in_draft = source.read("t2d", (target_size,), torch.bool) if "t2d" in source.names else None
    if in_draft is None and size < target_size and not bool(offsets.any()):
        raise ValueError(
            f"{source.origin}: d2t is zero throughout, which names the first {size} of {target_size} ids, and there is "
            "no t2d to confirm it; export the head with its vocabulary map"
        )
    if size == target_size and in_draft is not None and not bool(in_draft.any()):
        in_draft = None
    if in_draft is not None and not torch.equal(in_draft.nonzero().squeeze(1), ids):
        raise ValueError(f"{source.origin}: t2d and d2t name different tokens")
    return offsets


def read_token_map(path: Path, target_size: int) -> Tensor:
    """Target ids a head may propose (FR-Spec, arXiv:2502.14856), sorted, int64 `[Vd]`.

    Args:
        path: a `.pt` file with a list or tensor of ids, a `.json` list, or a `.txt` file of ids.

    Raises:
        ValueError: naming the file, if it is not such a list or an id is repeated or outside the vocabulary.
    """
    ids = _read_ids(path)
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"token_map: {path} must hold a flat list of token ids")
    outside = [index for index in ids if not 0 <= index < target_size]
    if outside:
        raise ValueError(f"token_map: {path} holds id {outside[0]}, the target's vocabulary has {target_size}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"token_map: {path} holds an id twice")
    return torch.tensor(sorted(ids))


def _read_ids(path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        if path.suffix == ".txt":
            return [int(word) for word in path.read_text().split()]
        if path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
            return content.tolist() if isinstance(content, Tensor) else content
    except FileNotFoundError:
        raise ValueError(f"token_map: {path} does not exist") from None
    except pickle.UnpicklingError:
        raise ValueError(f"token_map: {path} is not loaded: it holds objects other than a list of ids") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"token_map: {path} cannot be read: {first_line}") from None
    except (AssertionError, AttributeError, LookupError, TypeError, struct.error):  # as torch meets changed bytes
        raise ValueError(f"token_map: {path} cannot be read: it is damaged") from None
    raise ValueError(f"token_map: {path} must end in .pt, .json or .txt")
