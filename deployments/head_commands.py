"""`eyas convert HEAD OUT`: writes a head in another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.models.catalog import DEFAULT_HEAD, DEFAULT_TARGET, resolve_target, shipped_head

if TYPE_CHECKING:
    from eyas.models.head_files import HeadFiles


def add_convert_parser(subparsers: Any) -> None:
    """Add `convert` to an `argparse` subparsers object."""
    parser = subparsers.add_parser("convert", help="write a head in another format")
    parser.add_argument("head", help=f"folder or file of a head, or {DEFAULT_HEAD}")
    parser.add_argument("out", type=Path, help="what to write: a new folder, or a file that ends in .heads")
    parser.add_argument(
        "--format",
        choices=["heads", "folder", "vllm"],
        default="heads",
        help="one .heads file, the folder of the head's authors, or a folder that vLLM loads [%(default)s]",
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="the model the head is meant for [%(default)s]")
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    """Carry out `eyas convert`."""
    from eyas.models.head_loading import open_head

    files = open_head(shipped_head() if args.head == DEFAULT_HEAD else Path(args.head).expanduser())
    out: Path = args.out.expanduser()
    write_head(out, files, resolve_target(args.target), args.format)
    print(f"{out}: {files.kind} head, from {files.format} {files.path}")
    return 0


def write_head(out: Path, files: HeadFiles, target_folder: Path, layout: str | None = None) -> None:
    """Write a head in the layout `heads`, `folder` or `vllm`; None is `heads` for a name that ends so, else `folder`.

    Raises:
        ValueError: for a head that the layout has no place for.
    """
    from eyas.models.config import DecoderConfig
    from eyas.models.head_writing import (
        write_eagle_folder,
        write_heads_file,
        write_medusa_folder,
        write_vllm_eagle3_folder,
        write_vllm_medusa_folder,
    )
    from eyas.models.target_weights import TargetWeights

    config = DecoderConfig.from_folder(target_folder)
    if layout is None:
        layout = "heads" if out.suffix == ".heads" else "folder"
    if layout == "heads":
        write_heads_file(out, files, config)
    elif layout == "vllm" and files.kind == "medusa":
        write_vllm_medusa_folder(out, files, TargetWeights(target_folder, config))
    elif layout == "vllm":
        write_vllm_eagle3_folder(out, files, config)
    elif files.kind == "medusa":
        write_medusa_folder(out, files, config)
    else:
        write_eagle_folder(out, files, config)
