"""The GPU check runs through on a CPU: every step, its report, its plot, and the wheels it brings along."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "check.sh"
PIECE_BYTES = 200


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the check with this interpreter, in an environment without Triton's interpreter switched on."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [str(CHECK), *arguments],
        env=inherited | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def report_in(folder: Path) -> dict[str, object]:
    [file] = folder.glob("gpu-check-*-dry.json")
    report: dict[str, object] = json.loads(file.read_text())
    return report


def test_a_dry_run_passes_every_step(tmp_path: Path) -> None:
    finished = check("--dry-run", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = report_in(tmp_path)
    steps = report["steps"]
    assert isinstance(steps, dict)
    assert {name: part["status"] for name, part in steps.items()} == dict.fromkeys(steps, "passed")
    # The library has nothing that runs on a CPU.
    assert [name for name, part in steps.items() if not part["rows"]] == ["flashinfer_timing", "flashinfer_operators"]
    assert len(steps) == 12
    assert report["dry_run"]
    assert list(tmp_path.glob("*.png"))
    for figure in ("commit", "machine", "versions", "date"):
        assert report[figure]


def test_what_a_dry_run_cannot_do_is_said(tmp_path: Path) -> None:
    finished = check("--dry-run", "--only", "environment", "exchange_timing", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "left out: CUDA IPC" in finished.stdout
    assert "says nothing of a GPU" in finished.stdout


def test_a_step_that_fails_is_named_and_the_next_ones_run(tmp_path: Path) -> None:
    broken = tmp_path / "sitecustomize.py"
    broken.write_text("import sys\nsys.modules['exchange_timing'] = None\n")
    finished = check(
        "--dry-run", "--only", "exchange_timing", "environment", "--output", str(tmp_path), PYTHONPATH=str(tmp_path)
    )
    assert finished.returncode == 1
    assert "failed: exchange_timing" in finished.stdout
    steps = report_in(tmp_path)["steps"]
    assert isinstance(steps, dict)
    assert {name: part["status"] for name, part in steps.items()} == {
        "environment": "passed",
        "exchange_timing": "failed",
    }


def test_without_a_device_only_a_dry_run_starts(tmp_path: Path) -> None:
    finished = check("--output", str(tmp_path))
    assert finished.returncode == 2
    assert "--dry-run" in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A wheel of one module in pieces, as fetch_wheels.sh leaves them."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = tmp_path / "brought_along-1.0-py3-none-any.whl"
    about = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("brought_along.py", "HERE = True\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    content = wheel.read_bytes()
    assert len(content) > 2 * PIECE_BYTES
    for number, start in enumerate(range(0, len(content), PIECE_BYTES)):
        (folder / f"{wheel.name}.part{number:02}").write_bytes(content[start : start + PIECE_BYTES])
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  ./{wheel.name}\n")
    return folder


def test_wheels_in_pieces_are_joined_and_installed(wheels: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    finished = check("--help", EYAS_GPU_WHEELS=str(wheels), EYAS_GPU_SITE=str(site))
    assert finished.returncode == 0, finished.stderr
    assert (site / "brought_along.py").exists()


def test_a_damaged_piece_stops_the_check(wheels: Path, tmp_path: Path) -> None:
    piece = next(wheels.glob("*.part01"))
    piece.write_bytes(piece.read_bytes()[::-1])
    finished = check("--help", EYAS_GPU_WHEELS=str(wheels), EYAS_GPU_SITE=str(tmp_path / "site"))
    assert finished.returncode != 0
    assert "FAILED" in finished.stdout + finished.stderr
