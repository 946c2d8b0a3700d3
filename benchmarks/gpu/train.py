"""Collect what has arrived in pieces; once all is there, train an EAGLE-3 head on it. See train.sh.

A call that only brings pieces ends before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from pieces import INBOX, collect

MISSING = 3
KEPT = Path(__file__).resolve().parents[2] / "build" / "gpu-training"


def main() -> int:
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="train.sh", usage="train.sh [--dry-run] [--minutes M] [--output FOLDER] [-- OPTIONS of eyas train eagle3]"
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny random target on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="of training; a call may last ten [%(default)s]")
    parser.add_argument("--output", type=Path, help="folder of the result's pieces [build/gpu-training/result]")
    args = parser.parse_args(own)
    folder = Path(os.environ.get("EYAS_GPU_TRAINING", KEPT)).absolute()
    inbox = Path(os.environ.get("EYAS_TRAINING_PIECES", INBOX))
    if args.dry_run:
        folder = folder.with_name(f"{folder.name}-dry")
        shutil.rmtree(folder, ignore_errors=True)
        inbox = folder / "inbox"
        from head_run import write_tiny_pieces

        write_tiny_pieces(folder / "tiny", inbox)
    start = time.monotonic()
    try:
        missing = collect(inbox, folder / "pieces")
        if missing:
            print(f"{len(missing)} pieces are still missing: {' '.join(missing)}")
            return MISSING
        from head_run import pack_result, train, unpack

        unpack(folder / "pieces", folder / "unpacked")
        trained = train(folder, folder / "unpacked", args.minutes, args.dry_run, options)
    except ValueError as error:
        print(f"train.sh: {error}", file=sys.stderr)
        return 2
    output = (args.output or folder / "result").absolute()
    pack_result(trained, options, time.monotonic() - start, output)
    print(f"the result is in {output}; its file JOIN says how to put it together")
    return 0


if __name__ == "__main__":
    sys.exit(main())
