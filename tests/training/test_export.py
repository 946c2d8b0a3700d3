from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.eagle3_method import Eagle3Method, head_config
from eyas.training.export import draw_curve
from eyas.training.training_log import StepRecord, TrainingLog


@pytest.mark.parametrize("aux_layers", [(2, 3, 5), (0, 3), (3, 1, 6)])
def test_an_exported_head_loads_back_identical(
    target: DecoderConfig,
    target_folder: Path,
    new_eagle3: Callable[..., Eagle3Head],
    tmp_path: Path,
    aux_layers: tuple[int, ...],
) -> None:
    """Catches a tensor exported under another's name, a vocabulary map off by its offsets, and shifted aux layers."""
    token_ids = torch.arange(1, 64, 3)
    head = new_eagle3(token_ids, torch.bfloat16, aux_layers=aux_layers)
    with torch.no_grad():
        for weight in head.parameters():  # every value one that bfloat16 can hold
            weight.copy_(weight.to(torch.bfloat16))
    Eagle3Method(aux_layers).export(head, tmp_path)
    loaded = load_head(tmp_path, TargetWeights(target_folder, target), torch.bfloat16, torch.device("cpu"))
    assert isinstance(loaded, Eagle3Head)
    assert loaded.config == head.config
    assert loaded.config.aux_layers == aux_layers
    assert loaded.candidate_ids.tolist() == token_ids.tolist()
    expected = dict(head.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight.float(), expected[name].float()), name


def test_ambiguous_layers_are_refused(target: DecoderConfig) -> None:
    """Catches a file whose layer ids half of the engines would read one layer further up."""
    with pytest.raises(ValueError, match="aux_layers"):
        head_config(target, (1, 3, 5), 32)


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    """Catches a curve that fails on a log cut short by a kill."""
    log = TrainingLog(tmp_path / "log.jsonl")
    for step in range(5):
        log.write(StepRecord(step, 9.0 - step, [0.1, 0.2], 1.0, 100, float(step)))
    log.close()
    with (tmp_path / "log.jsonl").open("a") as opened:
        opened.write('{"step": 5, "lo')
    draw_curve(tmp_path / "log.jsonl", tmp_path / "curves" / "training.png")
    assert (tmp_path / "curves" / "training.png").read_bytes().startswith(b"\x89PNG")
