"""Pack texts and a target for a machine without network, in pieces for train.sh.

    python benchmarks/gpu/pack_training.py --corpus FOLDER [--corpus FOLDER ...] [--target NAME] [--piece-mib 60]

Of the corpora only the texts are packed: the target computes its states there. Its weights are packed in bfloat16.
The order of the corpora is kept: the last conversations of the last one are for validation.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
import tempfile
from pathlib import Path

import torch
from pieces import INBOX, cut
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.models.catalog import DEFAULT_TARGET, resolve_target
from eyas.training.shard import Shard, read_shard, save_shard, shard_files

TEXTS, TARGET = "texts.safetensors", "target.tar"
# What besides the weights belongs to a target: its shape, its tokenizer, its chat template.
_TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def pack(corpora: list[Path], target: Path, pieces: Path, piece_bytes: int) -> None:
    """Cut the texts of `corpora` and the folder `target` into pieces.

    Raises:
        ValueError: for a corpus without shards.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_texts(corpora, scratch / TEXTS)
        write_target(target, scratch / TARGET)
        cut([scratch / TEXTS, scratch / TARGET], pieces, piece_bytes)


def write_texts(corpora: list[Path], file: Path) -> None:
    """All conversations, with token ids in as few bytes as they need."""
    shards = []
    for corpus in corpora:
        files = shard_files(corpus)
        if not files:
            raise ValueError(f"--corpus: {corpus} holds no shard of a corpus")
        shards += [read_shard(each) for each in files]
    token_ids = torch.cat([shard.token_ids for shard in shards])
    tensors = {
        "token_ids": token_ids.to(torch.uint16 if int(token_ids.max()) < 1 << 16 else torch.int32),
        "is_answer": torch.cat([shard.is_answer for shard in shards]),
        "lengths": torch.tensor([length for shard in shards for length in shard.lengths], dtype=torch.int32),
    }
    save_file(tensors, file)


def read_texts(file: Path, corpus: Path) -> None:
    """Write what `write_texts` packed as a corpus of texts only."""
    corpus.mkdir(parents=True, exist_ok=True)
    tensors = load_file(file)
    lengths: list[int] = tensors["lengths"].tolist()
    shard = Shard(tensors["token_ids"].long(), tensors["is_answer"], lengths, None)
    save_shard(shard, corpus / "shard-00000.safetensors")


def write_target(target: Path, file: Path) -> None:
    """A tar archive of a target's folder, its floating-point tensors in bfloat16."""
    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        folder = Path(name)
        for pattern in _TARGET_FILES:
            for each in target.glob(pattern):
                if not each.name.endswith(".index.json"):
                    shutil.copyfile(each, folder / each.name)
        tensors = {}
        for weights in sorted(target.glob("*.safetensors")):
            with safe_open(weights, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (not a mapping)
                    tensor = opened.get_tensor(key)
                    tensors[key] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        if not tensors:
            raise ValueError(f"--target: {target} holds no .safetensors file")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with tarfile.open(file, "w") as archive:
            for each in sorted(folder.iterdir()):
                archive.add(each, each.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, action="append", required=True, help="folder of shards; several times")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="the model that wrote them [%(default)s]")
    parser.add_argument("--piece-mib", type=int, default=60, help="largest piece [%(default)s]")
    parser.add_argument("--output", type=Path, default=INBOX, help="folder of the pieces [%(default)s]")
    args = parser.parse_args()
    try:
        pack(args.corpus, resolve_target(args.target), args.output, args.piece_mib << 20)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for piece in sorted(args.output.iterdir()):
        print(f"{piece.stat().st_size:12,} {piece}")


if __name__ == "__main__":
    main()
