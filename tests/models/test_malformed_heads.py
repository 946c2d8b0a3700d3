"""Damaged and mismatched heads, each refused with one line that says what is wrong with which file."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.head_loading import load_head, open_head
from eyas.models.head_writing import write_heads_file
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewTensors = Callable[..., dict[str, Tensor]]

Change = Callable[[Any], Any]
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 99\n"


class Sources:
    """Good heads of one target, as files to be damaged."""

    def __init__(self, target: Path, medusa: dict[str, Tensor], eagle: Path, root: Path) -> None:
        self.target, self.root = target, root
        self.config = DecoderConfig.from_folder(target)
        self.medusa = medusa
        self.eagle = eagle

    def refusal(self, path: Path) -> str:
        """What is said of the head at `path`."""
        with pytest.raises(ValueError, match=".") as refused:
            load_head(path, TargetWeights(self.target, self.config), torch.float32, torch.device("cpu"))
        return str(refused.value)

    def medusa_folder(self, change: Change | None = None, **config: Any) -> Path:
        tensors = {name: tensor.clone() for name, tensor in self.medusa.items()}
        if change is not None:
            change(tensors)
        save_file(tensors, self.root / "medusa_lm_head.safetensors")
        (self.root / "config.json").write_text(json.dumps(config))
        return self.root

    def eagle_folder(self, change: Change) -> Path:
        tensors = load_file(self.eagle / "model.safetensors")
        change(tensors)
        save_file(tensors, self.root / "model.safetensors")
        (self.root / "config.json").write_text((self.eagle / "config.json").read_text())
        return self.root

    def sidecar(self, change: Callable[[bytes], bytes]) -> Path:
        path = self.root / "h.heads"
        write_heads_file(path, open_head(self.medusa_folder()), self.config)
        path.write_bytes(change(path.read_bytes()))
        return path

    def sidecar_header(self, change: Change) -> Path:
        """A sidecar whose header `change` has gone over in place."""

        def rewrite(content: bytes) -> bytes:
            size = struct.unpack("<I", content[8:12])[0]
            header = json.loads(content[12 : 12 + size])
            change(header)
            text = json.dumps(header).encode()
            return content[:8] + struct.pack("<I", len(text)) + text + content[12 + size :]

        return self.sidecar(rewrite)


@pytest.fixture
def sources(tiny_models: TinyModels, medusa_tensors: NewTensors, tmp_path: Path) -> Sources:
    target = tiny_models.target()
    return Sources(target, medusa_tensors(), tiny_models.head(target, draft_vocab_size=23), tmp_path)


def check(message: str, *parts: str) -> None:
    assert "\n" not in message
    for part in parts:
        assert part in message


SIDECARS = {
    "empty": (lambda content: b"", ["is no .heads file", "b''"]),
    "wrong magic": (lambda content: b"TGMX" + content[4:], ["begins with b'TGMX', expected b'TGMH'"]),
    "LFS pointer": (lambda content: LFS_POINTER, ["is a Git LFS pointer", "git lfs pull"]),
    "only the magic": (lambda content: content[:7], ["ends within its first 12 bytes"]),
    "wrong version": (lambda c: c[:4] + struct.pack("<I", 2) + c[8:], ["version 2 of the format is not supported"]),
    "big-endian version": (lambda c: c[:4] + struct.pack(">I", 1) + c[8:], ["version 16777216"]),
    "header beyond the file": (lambda c: c[:8] + struct.pack("<I", 2**32 - 1) + c[12:], ["header of 4294967295 bytes"]),
    "header not JSON": (lambda c: c[:12] + b"!" + c[13:], ["the header is not valid JSON"]),
    "header not UTF-8": (lambda c: c[:12] + b"\xff\xff" + c[14:], ["the header is not valid JSON"]),
    "truncated": (lambda content: content[:-1], ["is truncated"]),
    "truncated by a tensor": (lambda content: content[: -4 * 61 * 32], ["is truncated"]),
    "trailing bytes": (lambda content: content + b"\0\0\0\0", ["is longer than its entries"]),
}


@pytest.mark.parametrize("case", SIDECARS)
def test_damaged_sidecars(case: str, sources: Sources) -> None:
    """Catches weights read from the wrong place, and a traceback in place of a reason."""
    change, parts = SIDECARS[case]
    check(sources.refusal(sources.sidecar(change)), str(sources.root / "h.heads"), *parts)


def entry(header: dict[str, Any], name: str = "blocks.0.layers.0.weight") -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in header["entries"] if each["name"] == name)
    return found


HEADERS: dict[str, tuple[Change, str]] = {
    "no kind": (lambda h: h.pop("kind"), "the header lacks kind"),
    "no base": (lambda h: h.pop("base"), "the header lacks base"),
    "no entries": (lambda h: h.pop("entries"), "the header lacks entries"),
    "unknown kind": (lambda h: h.update(kind="hydra"), "kind is 'hydra', expected one of eagle"),
    "kind is a list": (lambda h: h.update(kind=["medusa"]), "kind is ['medusa']"),
    "head count zero": (lambda h: h.update(heads=0), "heads is 0, expected a number"),
    "head count of another file": (lambda h: h.update(heads=4), "heads is 4, but the entries are of 3 heads"),
    "base is a name": (lambda h: h.update(base="llama"), "base must be a JSON object"),
    "base without vocab": (lambda h: h["base"].pop("vocab"), "base.vocab is None"),
    "another base": (lambda h: h["base"].update(layers=32), "another target: layers is 4, expected 32"),
    "first_offset": (lambda h: h.update(first_offset=3), "first_offset is 3, expected 1 or 2"),
    "config is a list": (lambda h: h.update(config=[]), "config must be a JSON object"),
    "entries empty": (lambda h: h.update(entries=[]), "entries must be a list of tensors"),
    "entry without a name": (lambda h: h["entries"][1].pop("name"), "entry 1 has no name"),
    "entry twice": (lambda h: h["entries"][1].update(h["entries"][0]), "occurs twice"),
    "negative shape": (lambda h: entry(h).update(shape=[-32, 32]), "[-32, 32], expected a list of numbers"),
    "fractional shape": (lambda h: entry(h).update(shape=[32.5, 32]), "[32.5, 32], expected a list"),
    "absurd shape": (lambda h: entry(h).update(shape=[2**40, 2**40]), "is truncated"),
    "entries overlap": (lambda h: entry(h).update(shape=[16, 32]), "is longer than its entries"),
    "shape of the same size": (lambda h: entry(h).update(shape=[16, 64]), "hidden_size:"),
    "tensor renamed": (lambda h: entry(h).update(name="gate"), "blocks.0.layers.0.weight"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_sidecar_headers(case: str, sources: Sources) -> None:
    """Catches a header that is believed where the file or the target contradicts it."""
    change, part = HEADERS[case]
    check(sources.refusal(sources.sidecar_header(change)), str(sources.root / "h.heads"), part)


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


MEDUSAS: dict[str, tuple[Change, str]] = {
    "no heads": (lambda t: [t.pop(name) for name in list(t) if "linear" in name], "no residual block of a Medusa head"),
    "missing block": (lambda t: t.pop("1.0.linear.weight"), "(1.0.linear.weight) of 3 heads"),
    "missing head": (lambda t: [t.pop(n) for n in list(t) if n[0] == "1"], "(1.0.linear.weight) of 3 heads"),
    "missing bias": (lambda t: t.pop("2.0.linear.bias"), "blocks.2.layers.0.bias is missing"),
    "missing projection": (lambda t: t.pop("1.1.weight"), "lm_heads.1.weight is missing, but other heads have"),
    "wrong hidden size": (
        lambda t: [t.update({n: torch.zeros(16, 16)}) for n in list(t) if n.endswith("linear.weight")],
        "reads states of 16, the target's are 32",
    ),
    "one head of another size": (put("2.0.linear.weight", torch.zeros(16, 16)), "is [16, 16], expected [32, 32]"),
    "wrong vocabulary": (
        lambda t: [t.update({f"{head}.1.weight": torch.zeros(64, 32)}) for head in range(3)],
        "score 64 tokens, the target has 61",
    ),
    "one projection of another size": (put("2.1.weight", torch.zeros(60, 32)), "is [60, 32], expected [61, 32]"),
    "unknown tensor": (put("0.norm.weight", torch.ones(32)), "tensor 0.norm.weight belongs to a variant of Medusa"),
    "NaN": (lambda t: t["1.0.linear.weight"].__setitem__((3, 4), torch.nan), "1.layers.0.weight holds NaN"),
    "infinity": (lambda t: t["0.1.weight"].__setitem__((3, 4), torch.inf), "lm_heads.0.weight holds NaN or infinity"),
    "scalar": (put("0.0.linear.weight", torch.tensor(1.0)), "is [], expected a matrix"),
    "map leaves the vocabulary": (put("token_map", torch.arange(61) + 1), "token_map must list different ids below 61"),
    "map repeats an id": (put("token_map", torch.zeros(61, dtype=torch.int64)), "must list different ids"),
    "map of another length": (
        lambda t: t.update({f"{head}.1.weight": torch.zeros(50, 32) for head in range(3)}, token_map=torch.arange(40)),
        "score 50 tokens, but token_map lists 40",
    ),
    "map of two dimensions": (put("token_map", torch.zeros(3, 3)), "token_map is [3, 3], expected a list"),
}


@pytest.mark.parametrize("case", MEDUSAS)
def test_wrong_medusa_tensors(case: str, sources: Sources) -> None:
    """Catches weights made up, left out or taken from another head, and a traceback in place of a reason."""
    change, part = MEDUSAS[case]
    check(sources.refusal(sources.medusa_folder(change)), str(sources.root), part)


EAGLES: dict[str, tuple[Change, str]] = {
    "missing d2t": (lambda t: t.pop("d2t"), "tensor d2t is missing, but draft_vocab_size is 23"),
    "d2t out of range": (lambda t: t["d2t"].__setitem__(-1, 61), "strictly increasing ids below 61"),
    "d2t repeats": (lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1), "strictly increasing"),
    "missing fc": (lambda t: t.pop("fc.weight"), "fc.weight"),
    "missing projection": (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    "NaN": (lambda t: t["norm.weight"].__setitem__(0, torch.nan), "tensor norm.weight holds NaN"),
    "unknown tensor": (lambda t: t.update({"gate.weight": torch.zeros(2)}), "gate.weight"),
}


@pytest.mark.parametrize("case", EAGLES)
def test_wrong_eagle_tensors(case: str, sources: Sources) -> None:
    """Catches the same for EAGLE-3 folders."""
    change, part = EAGLES[case]
    check(sources.refusal(sources.eagle_folder(change)), part)


class Command:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("unpickled"),))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (pickle.dumps({"0.0.linear.weight": Command()}, protocol=2), "which would run code; convert it to safetensors"),
        (None, "must hold a dictionary of tensors"),
        (LFS_POINTER, "it is a Git LFS pointer"),
        (b"", "cannot be read"),
        (b"PK\x03\x04 cut off", "cannot be read"),
    ],
    ids=["code", "list", "LFS pointer", "empty", "truncated"],
)
def test_wrong_pickles(content: bytes | None, part: str, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a published file that runs code in the server, or that fails deep inside torch."""
    monkeypatch.chdir(sources.root)
    path = sources.root / "medusa_lm_head.pt"
    if content is None:
        torch.save(list(sources.medusa.values()), path)
    else:
        path.write_bytes(content)
    check(sources.refusal(path), str(path), part)
    check(sources.refusal(sources.root), str(path), part)
    assert not (sources.root / "unpickled").exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda content: content[:-100], "cannot be read as safetensors"),
        (lambda content: content[:20], "cannot be read as safetensors"),
        (lambda content: b"", "cannot be read as safetensors"),
        (lambda content: LFS_POINTER, "it is a Git LFS pointer"),
    ],
    ids=["truncated", "truncated header", "empty", "LFS pointer"],
)
def test_damaged_safetensors(change: Callable[[bytes], bytes], part: str, sources: Sources) -> None:
    """Catches the library's own words without the file they are about."""
    path = sources.medusa_folder() / "medusa_lm_head.safetensors"
    path.write_bytes(change(path.read_bytes()))
    check(sources.refusal(sources.root), str(path), part)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold a JSON object, found list"),
        ('{"medusa_num_heads": 3, "logit_scale": "high"}', "logit_scale"),
    ],
)
def test_wrong_configs(text: str, part: str, sources: Sources) -> None:
    """Catches a config that is ignored where it cannot be read."""
    (sources.medusa_folder() / "config.json").write_text(text)
    check(sources.refusal(sources.root), part)


def test_vocabulary_of_another_target(sources: Sources) -> None:
    """Catches heads over the target's own projection, which would fit any target of that width."""
    tensors = {name.replace(".0.linear", ".layers.0"): t for name, t in sources.medusa.items() if "linear" in name}
    save_file({f"blocks.{name}": t for name, t in tensors.items()}, sources.root / "model.safetensors")
    (sources.root / "config.json").write_text('{"model_type": "medusa", "vocab_size": 99}')
    check(sources.refusal(sources.root), "vocab_size:", "was made for 99, the target has 61")
