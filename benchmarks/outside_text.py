"""Collect English text that no language model's chat wrote: the documentation inside the installed Python packages.

    python benchmarks/outside_text.py OUT.txt [--megabytes 6]

For the ablation's rows on outside text (docs/training.md). Docstrings of at least 300 characters, each once, from files
of the standard library and the installed packages in an order that a fixed seed shuffles.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from rich.progress import Progress

_MIN_CHARACTERS = 300
_MAX_FILE_BYTES = 2_000_000
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file: Path) -> Iterator[str]:
    """Long docstrings of a source file; none of one that Python cannot parse."""
    if file.stat().st_size > _MAX_FILE_BYTES:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= _MIN_CHARACTERS and "\0" not in text:
                yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=6.0, help="of text to keep")
    args = parser.parse_args()
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    random.Random(0).shuffle(files)
    texts: dict[str, None] = {}
    with Progress() as progress:
        task = progress.add_task("reading docstrings", total=args.megabytes * 1e6)
        for text in (text for file in files for text in docstrings(file)):
            if text not in texts:
                texts[text] = None
                progress.advance(task, len(text.encode()))
                if progress.finished:
                    break
    args.out.write_text("\n\n".join(texts) + "\n")
    print(f"{args.out}: {len(texts)} docstrings, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
