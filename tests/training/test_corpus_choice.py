from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eyas.training.corpus_choice import NAMES, CorpusChoice
from eyas.training.ranks import ALONE
from eyas.training.shard import Shard, save_shard

STATE_FILE = Path("training-state.pt")


def choose(*folders: Path, state: dict[str, Any] | None = None) -> CorpusChoice:
    return CorpusChoice.of(folders, state, STATE_FILE, ALONE)


@pytest.fixture
def folders(shard: Shard, tmp_path: Path) -> list[Path]:
    """Two of one shard each."""
    found = [tmp_path / name for name in ("one", "two")]
    for folder in found:
        folder.mkdir()
        save_shard(shard, folder / "shard-00000.safetensors")
    return found


def test_a_resumed_run_keeps_its_shards(folders: list[Path], shard: Shard) -> None:
    """Catches shards written since that change the batches of a run."""
    chosen = choose(*folders)
    assert chosen.names == [(str(folder), "shard-00000.safetensors") for folder in folders]
    save_shard(shard, folders[0] / "shard-00001.safetensors")
    assert choose(*folders, state={NAMES: chosen.names}) == chosen
    assert len(choose(*folders).names) == 3


def test_what_is_gone_is_refused(folders: list[Path]) -> None:
    """Catches a resumed run on fewer texts, on others, or in another order."""
    state = {NAMES: choose(*folders).names}
    for given in (folders[:1], folders[::-1]):
        with pytest.raises(ValueError, match=r"^training-state.pt was written with the corpus .*, now it is"):
            choose(*given, state=state)
    (folders[1] / "shard-00000.safetensors").rename(folders[1] / "shard-00001.safetensors")
    with pytest.raises(ValueError, match=r"--corpus: the run was begun with .*two/shard-00000.safetensors, too"):
        choose(*folders, state=state)


@pytest.mark.parametrize("names", [[], ["shard-00000.safetensors"]])
def test_a_state_that_names_no_folders_is_refused(folders: list[Path], names: list[str]) -> None:
    """Catches a trace on the state of an earlier version."""
    with pytest.raises(ValueError, match="does not say which folders its shards are in"):
        choose(*folders, state={NAMES: names})


def test_states_are_of_the_width_that_is_needed(folders: list[Path], shard: Shard) -> None:
    """Catches a corpus of another target, and one of texts alone that is refused for having no states."""
    assert shard.features is not None
    width = shard.features.shape[1]
    save_shard(dataclasses.replace(shard, features=None), folders[1] / "shard-00000.safetensors")
    assert [each.features is None for each in choose(*folders).read(width, "")] == [False, True]
    with pytest.raises(ValueError, match=f"--corpus: .*one/shard-.* are {width} wide, the layers of it are 64; give"):
        choose(*folders).read(64, "the layers of it are")
