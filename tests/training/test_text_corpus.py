from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.training.shard import read_shard, shard_files
from eyas.training.text_corpus import MANIFEST, Manifest, bytes_per_token, shards_of, write_texts
from eyas.training.texts import Text, windows


def texts_of(*lengths: int) -> list[Text]:
    return [Text(torch.arange(length) + 10 * length, torch.arange(length) > 1) for length in lengths]


class Target:
    """States are a token's id and its place in the batch; counts what it was asked for, and may break down."""

    def __init__(self, breaks_after: int | None = None) -> None:
        self.num_calls = 0
        self.breaks_after = breaks_after

    def __call__(self, token_ids: Tensor, lengths: list[int]) -> Tensor:
        if self.num_calls == self.breaks_after:
            raise KeyboardInterrupt
        self.num_calls += 1
        assert sum(lengths) == token_ids.shape[0]
        return torch.stack([token_ids, torch.arange(len(token_ids))], dim=1).float()


def test_shards_hold_whole_texts_in_order() -> None:
    """Catches texts lost, doubled or cut between shards, and an empty shard before a text larger than a shard."""
    shards = shards_of(texts_of(3, 4, 9, 2, 2), token_bytes=10, shard_bytes=70)
    assert [[text.token_ids.shape[0] for text in shard] for shard in shards] == [[3, 4], [9], [2, 2]]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Catches states, masks or lengths that are shifted against their tokens."""
    texts = texts_of(3, 4, 5)
    counted: list[int] = []
    write_texts(tmp_path, [texts[:2], texts[2:]], Target(), counted.append)
    first, second = (read_shard(file) for file in shard_files(tmp_path))
    assert first.lengths == [3, 4]
    assert second.lengths == [5]
    assert counted == [7, 5]
    assert torch.equal(first.token_ids, torch.cat([text.token_ids for text in texts[:2]]))
    assert torch.equal(second.is_answer, texts[2].is_answer)
    assert first.features is not None
    assert first.features.dtype == torch.bfloat16
    assert torch.equal(first.features[:, 0].long(), first.token_ids)


def test_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    """Catches ids that are not the bytes of the text."""
    text = "Grüße, 世界!\n" * 3
    write_texts(tmp_path, [windows(text.encode(), 7)], None)
    shard = read_shard(shard_files(tmp_path)[0])
    assert shard.features is None
    assert bytes(shard.token_ids.tolist()).decode() == text


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """Catches complete shards that are computed again, and ones left out after a break."""
    shards = [[text] for text in texts_of(3, 4, 5)]
    with pytest.raises(KeyboardInterrupt):
        write_texts(tmp_path, shards, Target(breaks_after=1))
    before = [file.stat().st_mtime_ns for file in shard_files(tmp_path)]
    assert len(before) == 1
    again = Target()
    write_texts(tmp_path, shards, again)
    assert again.num_calls == 2
    assert [read_shard(file).lengths for file in shard_files(tmp_path)] == [[3], [4], [5]]
    assert shard_files(tmp_path)[0].stat().st_mtime_ns == before[0]


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Catches a target that overflows, whose head would learn nothing after hours of recording."""
    with pytest.raises(ValueError, match="--target: its states at the texts of shard 0 are not finite"):
        write_texts(tmp_path, [texts_of(3)], lambda token_ids, lengths: torch.full((3, 2), torch.nan))
    assert not shard_files(tmp_path)


def test_bytes_of_a_token() -> None:
    """Catches an announced size that is not the size of the file."""
    assert bytes_per_token(0, 64) == 9
    assert bytes_per_token(4, 576) == 9 + 4 * 576 * 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_text("text")
    return file


def test_the_same_corpus_is_taken_up_again(tmp_path: Path, source: Path) -> None:
    """Catches a resumed run that is refused although nothing has changed but the file's place and name."""
    folder = tmp_path / "texts"
    Manifest.of([source], {"window": 8}).claim(folder)
    moved = source.rename(tmp_path / "b.txt")
    Manifest.of([moved], {"window": 8}).claim(folder)
    written = json.loads((folder / MANIFEST).read_text())
    assert written["sources"] == [
        {
            "file": str(source),
            "size": 4,
            "sha256": "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1",
        }
    ]
    assert [file.name for file in folder.iterdir()] == [MANIFEST]


@pytest.mark.parametrize(
    ("content", "options", "num_files", "change"),
    [
        ("texT", {"window": 8}, 1, "FILE has changed since"),
        ("text", {"window": 9}, 1, "window was 8, now it is 9"),
        ("text", {}, 1, "window was 8, now it is None"),
        ("text", {"window": 8}, 2, "it was made of 1 files, now there are 2"),
    ],
)
def test_another_corpus_is_refused(
    tmp_path: Path, source: Path, content: str, options: dict[str, object], num_files: int, change: str
) -> None:
    """Catches shards of two texts or options that are mixed."""
    folder = tmp_path / "texts"
    Manifest.of([source], {"window": 8}).claim(folder)
    source.write_text(content)
    message = (
        f"--work-dir: {folder} holds a corpus made of something else: {change.replace('FILE', str(source))}; go back "
        "to what it was made of, remove that folder, or choose another --work-dir"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Manifest.of([source] * num_files, options).claim(folder)


def test_shards_of_unknown_origin_are_refused(tmp_path: Path, source: Path) -> None:
    """Catches a corpus of an earlier version to which others would be added."""
    write_texts(tmp_path, [texts_of(3)], None)
    with pytest.raises(ValueError, match=r"holds shards without a manifest\.json; name that folder with --corpus"):
        Manifest.of([source], {}).claim(tmp_path)
