"""Which shards a run is trained on: all that lie in its corpus folders when it begins, and the same ever after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.training.ranks import Ranks
from eyas.training.shard import Shard, read_shard, shard_files

ShardNames = list[tuple[str, str]]
"""Folder and file name of every shard."""

NAMES = "shard_names"  # where a run's state keeps them


@dataclass(frozen=True, slots=True)
class CorpusChoice:
    """The shards in the order they are read in; the same on all ranks, though their folders may still be written to."""

    names: ShardNames

    @staticmethod
    def of(folders: Sequence[Path], state: dict[str, Any] | None, state_file: Path, ranks: Ranks) -> CorpusChoice:
        """Choose for a new run, whose `state` is None, or as it was begun.

        Args:
            state_file: what an error names.

        Raises:
            ValueError: if a run to be resumed was begun with other folders, or with shards that are no longer there.
        """
        if not ranks.is_first:
            return CorpusChoice(ranks.agree([]))
        found = [(str(folder.resolve()), file.name) for folder in folders for file in shard_files(folder)]
        return CorpusChoice(ranks.agree(found if state is None else _as_before(state, found, state_file)))

    def read(self, width: int, need: str) -> list[Shard]:
        """The shards; those without states are left to be computed.

        Args:
            width: of the states, `(A + 1) * H`.
            need: says in an error what is so wide.

        Raises:
            ValueError: for states of another width.
        """
        shards = []
        for folder, name in self.names:
            shard = read_shard(Path(folder, name))
            if shard.features is not None and shard.features.shape[1] != width:
                raise ValueError(
                    f"--corpus: {folder}/{name}: states are {shard.features.shape[1]} wide, {need} {width}; give the "
                    "corpus of this target"
                )
            shards.append(shard)
        return shards


def _as_before(state: dict[str, Any], found: ShardNames, state_file: Path) -> ShardNames:
    """The shards a run was begun with, which may have become more since."""
    written: ShardNames = state.get(NAMES, [])
    if not written or any(isinstance(name, str) for name in written):
        raise ValueError(
            f"{state_file} was written by an earlier version and does not say which folders its shards are in; choose "
            "another work folder"
        )
    folders, given_folders = ([*dict.fromkeys(folder for folder, _ in names)] for names in (written, found))
    if folders != given_folders:
        raise ValueError(
            f"{state_file} was written with the corpus {', '.join(folders)}, now it is {', '.join(given_folders)}; "
            "resume with the same --corpus or choose another work folder"
        )
    missing = ["/".join(name) for name in written if name not in found]
    if missing:
        raise ValueError(f"--corpus: the run was begun with {missing[0]}, too; resume with the same corpus")
    return written
