"""Writing the files of a trained head, and the curve of its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.head_writing import save_folder
from eyas.training.training_log import VALIDATION_FILE, ValidationRecord, read_log, read_records

_SMOOTHING = 0.95


def write_folder(folder: Path, file_name: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a published head: its tensors (floating-point ones as bfloat16) and `config.json`."""
    converted = {
        name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    save_folder(folder, file_name, config, converted)


def draw_curve(log_file: Path, image_file: Path) -> None:
    """Draw loss and accuracies of a training log, smoothed, and of the validations beside it, as a PNG.

    Raises:
        RuntimeError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("the training curve needs matplotlib: pip install 'eyas[train]'") from None
    records = read_log(log_file)
    validations = read_records(ValidationRecord, log_file.with_name(VALIDATION_FILE))
    steps, checked = [record.step for record in records], [record.step for record in validations]
    figure = Figure(figsize=(15, 4), layout="constrained")
    loss_axes, accuracy_axes, length_axes = figure.subplots(1, 3)
    loss_axes.plot(steps, _smooth([record.loss for record in records]))
    loss_axes.set(xlabel="step", ylabel="loss", title="training loss")
    for index in range(len(records[0].accuracy) if records else 0):
        smooth = _smooth([record.accuracy[index] for record in records])
        accuracy_axes.plot(steps, smooth, color=f"C{index}", alpha=0.5)
    for index in range(len(validations[0].recall) if validations else 0):
        shares = [record.recall[index][0] for record in validations]
        accuracy_axes.plot(checked, shares, color=f"C{index}", marker=".", label=f"level {index + 1}")
    title = "accuracy by level: training (pale), validation"
    accuracy_axes.set(xlabel="step", ylabel="agreement with the target", title=title, ylim=(0, 1))
    length_axes.plot(checked, [record.tree_length for record in validations], marker=".", label="tree")
    length_axes.plot(checked, [record.chain_length for record in validations], marker=".", label="chain")
    length_axes.set(xlabel="step", ylabel="tokens per verify step", title="validation: acceptance length")
    for axes in (accuracy_axes, length_axes) if validations else ():
        axes.legend()
    image_file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image_file, dpi=120)


def _smooth(values: list[float]) -> list[float]:
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(mean / weight)
    return smoothed
