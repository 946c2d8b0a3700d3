"""Texts written as shards, with the target's states or without; an interrupted run goes on with the next shard.

A manifest beside the shards says what they were made of. It is written first, so that shards of other texts or options
are never mixed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.training.dataset import ComputeStates
from eyas.training.packing import in_groups
from eyas.training.shard import Shard, save_shard, shard_files
from eyas.training.texts import Text

MANIFEST = "manifest.json"
_SHARD_BYTES = 2**28
_TOKEN_BYTES = 9  # the id and whether it is an answer


def bytes_per_token(num_states: int, hidden_size: int) -> int:
    """What a token takes on disk with `num_states` bfloat16 states of `hidden_size`; 0 states are texts alone."""
    return _TOKEN_BYTES + 2 * num_states * hidden_size


def shards_of(texts: Sequence[Text], token_bytes: int, shard_bytes: int = _SHARD_BYTES) -> list[list[Text]]:
    """Texts in the given order, cut into shards of about `shard_bytes`."""
    return in_groups(texts, lambda text: text.token_ids.shape[0] * token_bytes, shard_bytes)


def shard_file(folder: Path, index: int) -> Path:
    """File of a corpus' shard."""
    return folder / f"shard-{index:05d}.safetensors"


def write_texts(
    folder: Path,
    shards: Sequence[Sequence[Text]],
    compute_states: ComputeStates | None,
    on_shard: Callable[[int], None] = lambda num_tokens: None,
) -> None:
    """Write the shards that are missing.

    Args:
        compute_states: None writes texts alone.
        on_shard: called with the tokens of every shard that is there.

    Raises:
        ValueError: if the target's states are not finite.
    """
    for index, texts in enumerate(shards):
        file = shard_file(folder, index)
        lengths = [text.token_ids.shape[0] for text in texts]
        if not file.exists():
            token_ids = torch.cat([text.token_ids for text in texts])
            states = None
            if compute_states is not None:
                states = compute_states(token_ids, lengths).to(torch.bfloat16).cpu()
                if not bool(states.isfinite().all()):
                    raise ValueError(f"--target: its states at the texts of shard {index} are not finite")
            save_shard(Shard(token_ids, torch.cat([text.is_answer for text in texts]), lengths, states), file)
        on_shard(sum(lengths))


@dataclass(frozen=True)
class Manifest:
    """What a corpus was made of.

    Args:
        sources: files, each with its name, size and SHA-256.
        options: whatever else decides over its content.
    """

    sources: list[dict[str, Any]]
    options: dict[str, Any]

    @staticmethod
    def of(files: Sequence[Path], options: dict[str, Any]) -> Manifest:
        return Manifest([_source(file) for file in files], options)

    def check(self, folder: Path) -> None:
        """Raise `ValueError` if `folder` holds another corpus."""
        file = folder / MANIFEST
        if not file.exists():
            if shard_files(folder):
                raise ValueError(
                    f"--work-dir: {folder} holds shards without a {MANIFEST}; name that folder with --corpus to train "
                    "on them, or choose another --work-dir"
                )
            return
        change = self._change_since(json.loads(file.read_text()))
        if change is not None:
            raise ValueError(
                f"--work-dir: {folder} holds a corpus made of something else: {change}; go back to what it was made "
                "of, remove that folder, or choose another --work-dir"
            )

    def claim(self, folder: Path) -> None:
        """Make `folder` the place of this corpus: `check`, then write the manifest if it is not there."""
        self.check(folder)
        file = folder / MANIFEST
        if file.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"sources": self.sources, "options": self.options}, indent=1) + "\n")
        partial.replace(file)

    def _change_since(self, earlier: dict[str, Any]) -> str | None:
        keys = ("size", "sha256")
        before, now = ([tuple(source[key] for key in keys) for source in x] for x in (earlier["sources"], self.sources))
        if len(before) != len(now):
            return f"it was made of {len(before)} files, now there are {len(now)}"
        for source, old, new in zip(self.sources, before, now, strict=True):
            if old != new:
                return f"{source['file']} has changed since"
        written = earlier["options"]
        for name in sorted(written.keys() | self.options.keys()):
            if written.get(name) != self.options.get(name):
                return f"{name} was {written.get(name)}, now it is {self.options.get(name)}"
        return None


def _source(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"file": str(file), "size": file.stat().st_size, "sha256": digest}
