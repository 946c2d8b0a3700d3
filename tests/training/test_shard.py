from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.training.shard import Shard, count_answer_tokens, read_shard, save_shard

ANSWERS = [False, True, True, False, False, True]


def make_shard(features: torch.Tensor | None) -> Shard:
    return Shard(torch.arange(6), torch.tensor(ANSWERS), [3, 3], features)


def test_a_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Catches a tensor lost on the way to disk, and a file that stays half-written."""
    for features in (None, torch.randn(6, 4).to(torch.bfloat16)):
        written = make_shard(features)
        save_shard(written, tmp_path / "shard-00000.safetensors")
        shard = read_shard(tmp_path / "shard-00000.safetensors")
        assert torch.equal(shard.token_ids, written.token_ids)
        assert torch.equal(shard.is_answer, written.is_answer)
        assert shard.lengths == [3, 3]
        assert shard.prompt_lengths() == [1, 2]
        assert (shard.features is None) == (features is None)
        if features is not None:
            assert torch.equal(shard.features, features)
        assert [file.name for file in tmp_path.iterdir()] == ["shard-00000.safetensors"]


def test_a_conversation_without_an_answer_is_all_prompt() -> None:
    """Catches an index of the first answer token that points at the first token of all."""
    assert Shard(torch.arange(3), torch.zeros(3, dtype=torch.bool), [3], None).prompt_lengths() == [3]


def test_a_shard_with_prompt_lengths_is_read(tmp_path: Path) -> None:
    """Catches a corpus of an earlier version that would have to be written again."""
    file = tmp_path / "shard-00000.safetensors"
    lengths = {"lengths": torch.tensor([3, 3]), "prompt_lengths": torch.tensor([1, 2])}
    save_file({"token_ids": torch.arange(6), "features": torch.zeros(6, 4)} | lengths, file)
    assert read_shard(file).is_answer.tolist() == [False, True, True, False, False, True]
    assert count_answer_tokens([file]) == 3
    save_shard(make_shard(None), file)
    assert count_answer_tokens([file]) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_is_mapped_not_loaded(tmp_path: Path) -> None:
    """Catches a reader that copies the states: a corpus of hours of recording would have to fit into memory."""
    file = tmp_path / "shard-00000.safetensors"
    save_shard(make_shard(torch.zeros(6, 4, dtype=torch.bfloat16)), file)
    shard = read_shard(file)
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    bounds = [tuple(int(bound, 16) for bound in each.split("-")) for each in ranges]
    assert shard.features is not None
    for tensor in (shard.features, shard.features[2:5]):
        assert any(start <= tensor.data_ptr() < end for start, end in bounds)
    assert not any(start <= shard.features.clone().data_ptr() < end for start, end in bounds)
