from __future__ import annotations

import io

from rich.console import Console

from eyas.training.progress import TrainingProgress
from eyas.training.training_log import StepRecord
from eyas.training.validation import Validation


def test_a_line_tells_how_training_goes() -> None:
    """Catches a figure left out of the line, or wrapped away where there is no terminal to read it in."""
    written = io.StringIO()
    with TrainingProgress(Console(file=written, width=40)) as progress:
        for step in range(3):
            progress.on_step(StepRecord(step, 2.5, [0.5, 0.25], 1.0, 300, 0.1 * step), num_steps=100)
        progress.on_validation(3, Validation([[0.4, 0.5, 0.6, 0.7], [0.2, 0.3, 0.4, 0.5]], 1.75, 2.25))
    line = next(line for line in written.getvalue().splitlines() if "step 3" in line)
    for figure in (
        "loss 2.500",
        "accuracy 0.400 0.200",
        "top-4 0.700 0.500",
        "chain length 1.750",
        "tree length 2.250",
        "3,000 tokens/s",
    ):
        assert figure in line
