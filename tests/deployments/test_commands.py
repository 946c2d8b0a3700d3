"""What the command line says to a user's mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.deployments import commands
from eyas.deployments.api_error import ApiError


def complaint(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `eyas` prints on standard error before it leaves with status 2."""
    monkeypatch.setattr(sys, "argv", ["eyas", *arguments.split()])
    capsys.readouterr()  # what making the models printed
    with pytest.raises(SystemExit) as left:
        commands.run()
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --prompt x --width 0", "width: "),
        ("generate --prompt x --threads 0", "threads_per_worker: "),
        ("generate nowhere --prompt x", "model: nowhere is neither"),
        ("generate TARGET --prompt x", "head: no head is shipped"),
        ("generate TARGET --prompt x --no-speculation --tp 3", "tensor_parallel_size: 3 cannot split"),
        ("generate TARGET --prompt x --no-speculation --num-pages 1 --page-size 1", "num_pages: "),
        ("serve --port 99999", "port: must be between 1 and 65535"),
        ("bench offline --prompts /nowhere --limit 0", "limit: "),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, message: str, tiny_models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stack trace, or a value that is silently replaced, where the user can mend the command."""
    line = complaint(arguments.replace("TARGET", str(tiny_models.target())), monkeypatch, capsys)
    assert line.startswith(f"eyas: {message}")
    assert line.count("\n") == 1


def test_the_module_is_the_command() -> None:
    """Catches `python -m eyas.deployments.cli`, which benchmarks call, doing nothing with success."""
    finished = subprocess.run([sys.executable, "-m", "eyas.deployments.cli"], capture_output=True, text=True)
    assert finished.returncode == 2
    assert "usage: eyas" in finished.stderr


@pytest.mark.parametrize("error", [ApiError(400, "messages: no chat template"), ConnectionError("a worker failed")])
def test_foreseen_failures_are_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stack trace for a model without a chat template or for a worker that died."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("eyas.deployments.local_engine.open_engine", fail)
    assert complaint("generate --prompt x", monkeypatch, capsys) == f"eyas: {error}\n"


def test_a_model_without_a_tokenizer_is_one_complaint(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page of advice from inside the tokenizer library, after the weights were loaded for nothing."""
    folder: Path = tiny_models.target()
    line = complaint(f"generate {folder} --prompt x --no-speculation", monkeypatch, capsys)
    assert line.startswith(f"eyas: model: no tokenizer can be read from {folder}: ")
    assert line.count("\n") == 1
