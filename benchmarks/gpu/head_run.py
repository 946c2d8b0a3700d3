"""A training run of train.py: target and texts out of their pieces, `eyas train eagle3`, and its result in pieces.

The states of the texts are computed by the target on the device, batch by batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import report
from pack_training import TARGET, TEXTS, pack, read_texts
from pieces import SUMS, cut, join
from tiny_training import write_tiny_corpus, write_tiny_target

from eyas.deployments.train_command import add_train_parser

_RESULT_PIECE_BYTES = 16 << 20
_TINY_PIECE_BYTES = 20_000
_RESULT = "result.tar"
_JOIN = f"""sha256sum --check {SUMS} && cat {_RESULT}.part* | tar --extract
"""
# Those of the shipped head's first stage, before the caller's own. Batches are larger, as a step of 1,500 rows hardly
# fills a GPU.
_RECIPE = ["--draft-vocab", "24576", "--batch-tokens", "4000"]
# What a dry run adds instead, before the caller's own options: the same path over tiny shapes.
_DRY_OPTIONS = ["--dtype", "float32", "--steps", "3", "--draft-vocab", "48", "--batch-tokens", "150", "--threads", "1"]


def write_tiny_pieces(folder: Path, inbox: Path) -> None:
    """What arrives in a dry run."""
    write_tiny_target(folder / "target")
    write_tiny_corpus(folder / "corpus")
    pack([folder / "corpus"], folder / "target", inbox, _TINY_PIECE_BYTES)


def unpack(store: Path, folder: Path) -> None:
    """Target and texts from their pieces, unless it was done by an earlier call."""
    sums = (store / SUMS).read_text()
    if (folder / SUMS).exists() and (folder / SUMS).read_text() == sums:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    join(store, TEXTS, folder / TEXTS)
    read_texts(folder / TEXTS, folder / "corpus")
    join(store, TARGET, folder / TARGET)
    with tarfile.open(folder / TARGET) as archive:
        archive.extractall(folder / "target", filter="data")
    (folder / TEXTS).unlink()
    (folder / TARGET).unlink()
    (folder / SUMS).write_text(sums)


def train(folder: Path, unpacked: Path, minutes: float, dry_run: bool, options: list[str]) -> argparse.Namespace:
    """Run the training here; returns the options it ran with.

    Raises:
        ValueError: as `eyas train` does.
    """
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    arguments = ["--target", str(unpacked / "target"), "--corpus", str(unpacked / "corpus"), "--states", "online"]
    arguments += ["--work-dir", str(folder / "work"), "--out", str(folder / "head")]
    length = ["--minutes", str(minutes)] if not {"--steps", "--minutes"} & set(options) else []
    arguments += ["--device", "cpu", *_DRY_OPTIONS] if dry_run else ["--device", "cuda", *_RECIPE, *length]
    args = parser.parse_args(["train", "eagle3", *arguments, *options])
    args.run(args)
    return args


def pack_result(args: argparse.Namespace, options: list[str], seconds: float, output: Path) -> None:
    """Head, logs, curve and a report of the run as pieces, with a note on how to join them."""
    about = {
        "commit": report.commit(),
        "machine": report.machine(),
        "versions": report.versions(),
        "options": options,
        "seconds": round(seconds, 1),
        "settings": {name: str(value) for name, value in sorted(vars(args).items()) if name != "run"},
    }
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "run.json").write_text(json.dumps(about, indent=1) + "\n")
        with tarfile.open(scratch / _RESULT, "w") as archive:
            archive.add(args.out, "head")
            archive.add(scratch / "run.json", "run.json")
            for file in sorted([*args.work_dir.glob("*.jsonl"), *args.work_dir.glob("*.png")]):
                archive.add(file, file.name)
        cut([scratch / _RESULT], output, _RESULT_PIECE_BYTES)
    (output / "JOIN").write_text(_JOIN)
