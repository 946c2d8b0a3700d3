"""The training of a GPU machine without network runs through on a CPU: from pieces to pieces."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.shard import Shard, read_shard, save_shard

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(GPU)
    return importlib.import_module("pieces")


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(GPU)
    return importlib.import_module("pack_training")


def run_train(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run train.sh with this interpreter, as on a machine that has neither Ray nor a web server."""
    folder.mkdir(exist_ok=True)
    absent = "".join(f"sys.modules[{name!r}] = None\n" for name in ("ray", "fastapi", "uvicorn", "pydantic"))
    (folder / "sitecustomize.py").write_text(f"import sys\n{absent}")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    places = {"EYAS_GPU_TRAINING": str(folder / "kept"), "EYAS_GPU_WHEELS": str(folder), "EYAS_GPU_SITE": str(folder)}
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [str(GPU / "train.sh"), *arguments],
        env=os.environ | own | places | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_dry_run_trains_a_head_and_packs_it(tmp_path: Path) -> None:
    """Catches a path that needs Ray, options that do not reach the training, and a result that cannot be joined."""
    output = tmp_path / "output"
    finished = run_train(tmp_path / "run", "--dry-run", "--output", str(output), "--", "--steps", "2", "--seed", "5")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    subprocess.run(["bash", "JOIN"], cwd=output, check=True, capture_output=True)
    about = json.loads((output / "run.json").read_text())
    assert about["options"] == ["--steps", "2", "--seed", "5"]
    assert about["settings"]["seed"] == "5"
    assert about["settings"]["states"] == "online"
    assert len((output / "log.jsonl").read_text().splitlines()) == 2
    assert (output / "training-curve.png").exists()
    target = tmp_path / "run" / "kept-dry" / "unpacked" / "target"
    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    load_head(output / "head", weights, torch.float32, torch.device("cpu"))


def test_training_waits_for_missing_pieces(tmp_path: Path) -> None:
    """Catches a run that starts on half a target, or that fails without saying what to bring."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "here.part000").write_bytes(b"1")
    sums = [(hashlib.sha256(b"1").hexdigest(), "here.part000"), (hashlib.sha256(b"2").hexdigest(), "there.part000")]
    (inbox / "SHA256SUMS").write_text("".join(f"{sum}  {name}\n" for sum, name in sums))
    finished = run_train(tmp_path / "run", EYAS_TRAINING_PIECES=str(inbox))
    assert finished.returncode == 3, finished.stderr
    assert "1 pieces are still missing: there.part000" in finished.stdout


def test_pieces_arrive_in_several_calls(pieces: ModuleType, tmp_path: Path) -> None:
    """Catches pieces that are lost when the next ones take their place, and pieces joined in another order."""
    whole, inbox, store = tmp_path / "whole", tmp_path / "inbox", tmp_path / "store"
    content = bytes(range(256)) * 5
    whole.write_bytes(content)
    pieces.cut([whole], tmp_path / "cut", 100)
    names = sorted(file.name for file in (tmp_path / "cut").glob("*.part*"))
    assert len(names) == 13
    for arriving in (names[5:], names[:5]):
        inbox.mkdir()
        for name in [*arriving, pieces.SUMS]:
            (inbox / name).write_bytes((tmp_path / "cut" / name).read_bytes())
        missing = pieces.collect(inbox, store)
        assert missing == ([] if arriving[0] == names[0] else names[:5])
        for file in inbox.iterdir():
            file.unlink()
        inbox.rmdir()
    assert pieces.collect(inbox, store) == []
    pieces.join(store, "whole", tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == content


def test_damaged_and_foreign_pieces_are_refused(pieces: ModuleType, tmp_path: Path) -> None:
    """Catches a flipped bit in a target, old pieces mixed with new ones, and sums that name files elsewhere."""
    whole, inbox, store = tmp_path / "whole", tmp_path / "inbox", tmp_path / "store"
    whole.write_bytes(b"first")
    pieces.cut([whole], inbox, 3)
    assert pieces.collect(inbox, store) == []
    whole.write_bytes(b"other")
    pieces.cut([whole], inbox, 3)
    (inbox / "whole.part001").unlink()
    assert pieces.collect(inbox, store) == ["whole.part001"]
    (inbox / "whole.part001").write_bytes(b"eR")
    with pytest.raises(ValueError, match=r"whole.part001 is damaged"):
        pieces.collect(inbox, store)
    (inbox / pieces.SUMS).write_text("00  ../whole\n")
    with pytest.raises(ValueError, match="not the name of a piece"):
        pieces.collect(inbox, store)
    with pytest.raises(ValueError, match="pack_training"):
        pieces.collect(tmp_path / "nothing", tmp_path / "nowhere")


def test_packed_texts_are_those_of_all_corpora(packing: ModuleType, tmp_path: Path) -> None:
    """Catches ids that do not fit the packed integers, corpora in another order, and answer marks that are lost."""
    shards = []
    for index, (lengths, largest) in enumerate([([3, 4], 65_535), ([5], 7)]):
        ids = torch.arange(sum(lengths))
        ids[-1] = largest
        is_answer = ids % 2 == 1
        shards.append(Shard(ids, is_answer, lengths, torch.zeros(sum(lengths), 8, dtype=torch.bfloat16)))
        (tmp_path / f"corpus-{index}").mkdir()
        save_shard(shards[-1], tmp_path / f"corpus-{index}" / "shard-00000.safetensors")
    packing.write_texts([tmp_path / "corpus-0", tmp_path / "corpus-1"], tmp_path / "texts.safetensors")
    assert load_file(tmp_path / "texts.safetensors")["token_ids"].dtype == torch.uint16
    packing.read_texts(tmp_path / "texts.safetensors", tmp_path / "joined")
    joined = read_shard(tmp_path / "joined" / "shard-00000.safetensors")
    assert joined.features is None
    assert joined.lengths == [3, 4, 5]
    assert torch.equal(joined.token_ids, torch.cat([shard.token_ids for shard in shards]))
    assert torch.equal(joined.is_answer, torch.cat([shard.is_answer for shard in shards]))
    with pytest.raises(ValueError, match="holds no shard"):
        packing.write_texts([tmp_path / "joined" / "none"], tmp_path / "texts.safetensors")
