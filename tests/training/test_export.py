from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.eagle3_method import Eagle3Method, head_config
from eyas.training.export import draw_curve
from eyas.training.training_log import StepRecord, TrainingLog, ValidationLog, ValidationRecord


@pytest.mark.parametrize(("aux_layers", "num_layers"), [((2, 3, 5), 1), ((0, 3), 1), ((3, 1, 6), 1), ((2, 3, 5), 2)])
def test_an_exported_head_loads_back_identical(
    target: DecoderConfig,
    target_folder: Path,
    new_eagle3: Callable[..., Eagle3Head],
    tmp_path: Path,
    aux_layers: tuple[int, ...],
    num_layers: int,
) -> None:
    """Catches a tensor exported under another's name, a vocabulary map off by its offsets, and shifted aux layers."""
    token_ids = torch.arange(1, 64, 3)
    head = new_eagle3(token_ids, torch.bfloat16, aux_layers=aux_layers, num_layers=num_layers)
    with torch.no_grad():
        for weight in head.parameters():  # every value one that bfloat16 can hold
            weight.copy_(weight.to(torch.bfloat16))
    Eagle3Method(aux_layers, num_layers).export(head, tmp_path)
    loaded = load_head(tmp_path, TargetWeights(target_folder, target), torch.bfloat16, torch.device("cpu"))
    assert isinstance(loaded, Eagle3Head)
    assert loaded.config == head.config
    assert loaded.config.aux_layers == aux_layers
    assert loaded.config.raw["num_hidden_layers"] == loaded.config.layers.num_layers == num_layers
    assert loaded.candidate_ids.tolist() == token_ids.tolist()
    expected = dict(head.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight.float(), expected[name].float()), name


def test_ambiguous_layers_are_refused(target: DecoderConfig) -> None:
    """Catches a file whose layer ids half of the engines would read one layer further up."""
    with pytest.raises(ValueError, match="aux_layers"):
        head_config(target, (1, 3, 5), 32)


def drawn_lines(log_file: Path, image_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[list[float]]]:
    """Per axes of the curve, the heights of every line."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []

    def save(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        write(figure, *args, **options)

    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", save)
    draw_curve(log_file, image_file)
    assert image_file.read_bytes().startswith(b"\x89PNG")
    return [[list(line.get_ydata()) for line in axes.get_lines()] for axes in figures[0].axes]


def test_the_curve_shows_training_and_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a curve that fails on a log cut short by a kill, and validations that are not drawn."""
    log, validations = TrainingLog(tmp_path / "log.jsonl"), ValidationLog(tmp_path / "validation.jsonl")
    for step in range(5):
        log.write(StepRecord(step, 9.0, [0.1, 0.2], 1.0, 100, float(step)))
    for step in (2, 4):
        recall = [[0.5, 0.6, 0.7, 0.8], [0.3, 0.4, 0.5, 0.6], [0.2, 0.3, 0.4, 0.5]]
        validations.write(ValidationRecord(step, recall, 1.0 + step, 2.0 + step))
    log.close()
    validations.close()
    with (tmp_path / "log.jsonl").open("a") as opened:
        opened.write('{"step": 5, "lo')
    lines = drawn_lines(tmp_path / "log.jsonl", tmp_path / "curves" / "training.png", monkeypatch)
    assert lines[0] == [pytest.approx([9.0] * 5)]
    assert lines[1] == [pytest.approx([0.1] * 5), pytest.approx([0.2] * 5), [0.5, 0.5], [0.3, 0.3], [0.2, 0.2]]
    assert lines[2] == [[4.0, 6.0], [3.0, 5.0]]


def test_the_curve_of_a_run_without_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that cannot be drawn before its first validation, or before its first step."""
    TrainingLog(tmp_path / "log.jsonl").close()
    lines = drawn_lines(tmp_path / "log.jsonl", tmp_path / "training.png", monkeypatch)
    assert lines == [[[]], [], [[], []]]
