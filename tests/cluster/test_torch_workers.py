from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.shard import Shard, save_shard
from eyas.training.training_log import read_log

if TYPE_CHECKING:
    from tests.conftest import TinyModels

TRAINED_HEAD = Path(__file__).with_name("ray_trained_head.py")
LENGTHS, PROMPT_TOKENS, NUM_STATES = [12, 9, 14, 10, 11, 13], 3, 4
TIMEOUT_S = 300


@pytest.mark.ray
def test_two_ray_workers_train_a_head(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches a training loop that Ray Train cannot carry to its workers, ranks that do not find each other there, and
    files that no rank or every rank writes. In a process of its own, because a process holds one Ray connection."""
    pytest.importorskip("ray.train.torch", reason="needs eyas[train]", exc_type=ImportError)
    folder = tiny_models.target(num_hidden_layers=6)
    target = DecoderConfig.from_folder(folder)
    generator, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    features = torch.randn(total, NUM_STATES * target.hidden_size, generator=generator).to(torch.bfloat16)
    token_ids = torch.randint(3, target.vocab_size, (total,), generator=generator)
    is_answer = torch.cat([torch.arange(length) >= PROMPT_TOKENS for length in LENGTHS])
    (tmp_path / "corpus").mkdir()
    save_shard(Shard(token_ids, is_answer, LENGTHS, features), tmp_path / "corpus" / "shard-00000.safetensors")
    work = tmp_path / "work"
    run = subprocess.run(
        [sys.executable, TRAINED_HEAD, folder, tmp_path / "corpus", work],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["num_steps"] == 3
    assert len(result["validation"]["recall"]) == 5
    records = read_log(work / "log.jsonl")
    assert [record.step for record in records] == [0, 1, 2]
    assert min(record.num_tokens for record in records) > 20, "the rows of one worker alone"
    load_head(work / "head", TargetWeights(folder, target), torch.float32, torch.device("cpu"))
