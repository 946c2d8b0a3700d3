"""What is written is read back as the same head, whatever format it came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.deployments import commands
from eyas.models.acceptance_prior import FIELD, AcceptancePrior
from eyas.models.config import DecoderConfig
from eyas.models.head_files import HeadFiles
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.head_writing import (
    write_eagle_folder,
    write_heads_file,
    write_medusa_folder,
    write_vllm_eagle3_folder,
    write_vllm_medusa_folder,
)
from eyas.models.heads_file import INTEGER_TENSORS
from eyas.models.medusa import MedusaHead
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewTensors = Callable[..., dict[str, Tensor]]

CPU = torch.device("cpu")


def contents(files: HeadFiles) -> dict[str, Tensor]:
    source = files.tensors
    return {n: source.read(n, source.shape(n), INTEGER_TENSORS.get(n, torch.float32)) for n in source.names}


def check_equal(written: HeadFiles, files: HeadFiles) -> None:
    assert written.kind == files.kind
    assert written.config == files.config
    found, expected = contents(written), contents(files)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def medusa(folder: Path, tensors: dict[str, Tensor], **config: Any) -> HeadFiles:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2} | config))
    return open_head(folder)


def logits(path: Path, target: TargetWeights) -> Tensor:
    head = load_head(path, target, torch.float32, CPU)
    assert isinstance(head, MedusaHead)
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    return head.logits(states, range(1, head.config.num_heads + 1))


@pytest.fixture
def target(tiny_models: TinyModels) -> TargetWeights:
    folder = tiny_models.target()
    return TargetWeights(folder, DecoderConfig.from_folder(folder))


@pytest.mark.parametrize("rows", [61, None], ids=["own projections", "the target's"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_round_trips(
    num_layers: int, rows: int | None, medusa_tensors: NewTensors, target: TargetWeights, tmp_path: Path
) -> None:
    """Catches a tensor renamed, shifted by a head, or rounded on its way through a format."""
    tensors = medusa_tensors(num_layers=num_layers, rows=rows)
    files = medusa(tmp_path / "head", tensors, base_model_name_or_path="a/base")
    write_heads_file(tmp_path / "out.heads", files, target.config)
    sidecar = open_head(tmp_path / "out.heads")
    check_equal(sidecar, files)
    assert sidecar.base is not None
    write_medusa_folder(tmp_path / "folder", sidecar, target.config)
    check_equal(open_head(tmp_path / "folder"), files)
    assert load_file(tmp_path / "folder" / "medusa_lm_head.safetensors").keys() == tensors.keys()
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, num_layers)
    write_vllm_medusa_folder(tmp_path / "vllm", files, target)
    expected = logits(tmp_path / "head", target)
    for path in ("out.heads", "folder", "vllm"):
        torch.testing.assert_close(logits(tmp_path / path, target), expected)


def test_vllm_folder_is_complete(medusa_tensors: NewTensors, target: TargetWeights, tmp_path: Path) -> None:
    """Catches a projection left for vLLM to share: it would draft from weights that were never set."""
    write_vllm_medusa_folder(tmp_path / "vllm", medusa(tmp_path / "head", medusa_tensors(rows=None)), target)
    written = load_file(tmp_path / "vllm" / "model.safetensors")
    assert torch.equal(written["lm_heads.0.weight"].float(), target.output(torch.float32))
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["original_lm_head"] is True
    assert config["medusa_fc_bias"] is True
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 1)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (61, 61)


@pytest.mark.parametrize("rows", [61, None], ids=["own projections", "the target's"])
def test_truncated_medusa_round_trips(
    rows: int | None, medusa_tensors: NewTensors, target: TargetWeights, tmp_path: Path
) -> None:
    """Catches a token map lost, and its rows taken twice."""
    tensors = medusa_tensors(rows=rows)
    names = {}
    for name, tensor in tensors.items():
        head, _, *rest = name.split(".")
        names[f"blocks.{head}.layers.0.{rest[1]}" if len(rest) == 2 else f"lm_heads.{head}.weight"] = tensor
    (tmp_path / "head").mkdir()
    save_file(names | {"token_map": torch.tensor([50, 2, 33])}, tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "config.json").write_text('{"model_type": "medusa", "logit_scale": 0.5}')
    files = open_head(tmp_path / "head")
    write_heads_file(tmp_path / "out.heads", files, target.config)
    check_equal(open_head(tmp_path / "out.heads"), files)
    write_vllm_medusa_folder(tmp_path / "vllm", files, target)
    torch.testing.assert_close(logits(tmp_path / "vllm", target), logits(tmp_path / "head", target))
    with pytest.raises(ValueError, match="has no place for token_map; use vllm"):
        write_medusa_folder(tmp_path / "folder", files, target.config)


def test_eagle_round_trips(tiny_models: TinyModels, target: TargetWeights, tmp_path: Path) -> None:
    """Catches vocabulary maps or config fields that a sidecar or a folder loses."""
    files = open_head(tiny_models.head(target.folder, draft_vocab_size=23))
    write_heads_file(tmp_path / "out.heads", files, target.config)
    sidecar = open_head(tmp_path / "out.heads")
    check_equal(sidecar, files)
    assert normalise_head(sidecar, target.config) == normalise_head(files, target.config)
    write_eagle_folder(tmp_path / "folder", sidecar, target.config)
    check_equal(open_head(tmp_path / "folder"), files)
    for path in (tmp_path / "out.heads", tmp_path / "folder"):
        load_head(path, target, torch.float32, CPU)
    with pytest.raises(ValueError, match="kind eagle3 has no Medusa folder"):
        write_medusa_folder(tmp_path / "medusa", files, target.config)


def test_mtp_round_trips(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Catches a module whose wiring, which its own format implies, is lost in a sidecar."""
    folder = tiny_models.target("Qwen2ForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    layer = {
        name.replace("layers.0.", "mtp_layers.0."): t.clone() for name, t in tensors.items() if "layers.0." in name
    }
    generator = torch.Generator().manual_seed(2)
    for name, shape in (
        ("token_layernorm", (32,)), ("hidden_layernorm", (32,)), ("input_proj", (32, 64)), ("final_layernorm", (32,))
    ):  # fmt: skip
        layer[f"model.mtp_layers.0.{name}.weight"] = torch.randn(shape, generator=generator)
    save_file(tensors | layer, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    files, target = open_head(folder), TargetWeights(folder, DecoderConfig.from_folder(folder))
    assert files.kind == "mtp"
    write_heads_file(tmp_path / "out.heads", files, target.config)
    sidecar = open_head(tmp_path / "out.heads")
    check_equal(sidecar, files)
    assert normalise_head(sidecar, target.config) == normalise_head(files, target.config)
    heads = [load_head(path, target, torch.float32, CPU) for path in (folder, tmp_path / "out.heads")]
    first, second = (head.state_dict() for head in heads)
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("make", ["eagle", "eagle3"])
def test_every_eagle_kind_loads_from_a_sidecar(
    make: str, tiny_models: TinyModels, target: TargetWeights, tmp_path: Path
) -> None:
    """Catches a kind whose loader needs what only its own folder has."""
    folder = tiny_models.eagle_head(target.folder) if make == "eagle" else tiny_models.head(target.folder)
    files = open_head(folder)
    assert files.kind == make
    write_heads_file(tmp_path / "out.heads", files, target.config)
    check_equal(open_head(tmp_path / "out.heads"), files)
    first, second = (
        load_head(path, target, torch.float32, CPU).state_dict() for path in (folder, tmp_path / "out.heads")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize(("make", "rows"), [("eagle", 61), ("eagle3", 23)])
def test_factors_of_candidates_round_trip(
    make: str,
    rows: int,
    tiny_models: TinyModels,
    target: TargetWeights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a low-rank candidate projection, or how many candidates it finds, lost on the way through a format."""
    if make == "eagle":
        plain = tiny_models.eagle_head(target.folder, num_candidates=9)
    else:
        plain = tiny_models.head(target.folder, draft_vocab_size=23, num_candidates=9)
    factors = {"efficient_lm_head_down_proj.weight": (5, 32), "efficient_lm_head.weight": (rows, 5)}
    folder = tiny_models.changed(plain, factors)
    source, expected = folder, load_head(folder, target, torch.float32, CPU).state_dict()
    assert {"projection.up.weight", "projection.down.weight"} <= expected.keys()
    for out, layout in (("out.heads", "heads"), ("folder", "folder")):
        path = tmp_path / out
        args = ["convert", str(source), str(path), "--format", layout, "--target", str(target.folder)]
        assert run(monkeypatch, *args) == 0
        check_equal(open_head(path), open_head(folder))
        head = load_head(path, target, torch.float32, CPU)
        found = head.state_dict()
        assert head.max_candidates == 9
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        source = path


def test_vllm_folder_of_eagle3_has_no_factors(
    tiny_models: TinyModels, target: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches tensors that vLLM stops at as unknown, and a head that lost more than these."""
    plain = tiny_models.head(target.folder, draft_vocab_size=23)
    with_factors = tiny_models.head(target.folder, draft_vocab_size=23, num_candidates=9)
    factors = {"efficient_lm_head_down_proj.weight": (5, 32), "efficient_lm_head.weight": (23, 5)}
    folder = tiny_models.changed(with_factors, factors)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle4"],
        FIELD: AcceptancePrior(torch.tensor([-1.0, 0.0]), None, None).as_json(),
    }
    (folder / "config.json").write_text(json.dumps(config))
    args = ["convert", str(folder), str(tmp_path / "vllm"), "--format", "vllm", "--target", str(target.folder)]
    assert run(monkeypatch, *args) == 0
    written = open_head(tmp_path / "vllm")
    assert written.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "num_candidates" not in written.config
    assert FIELD not in written.config
    assert contents(written).keys() == contents(open_head(plain)).keys()
    assert all(torch.equal(tensor, contents(written)[name]) for name, tensor in contents(open_head(plain)).items())


def test_vllm_folder_of_other_kinds_is_refused(tiny_models: TinyModels, target: TargetWeights, tmp_path: Path) -> None:
    """Catches a folder written that vLLM was never seen to load."""
    files = open_head(tiny_models.eagle_head(target.folder))
    with pytest.raises(ValueError, match="for medusa and eagle3 heads, not eagle"):
        write_vllm_eagle3_folder(tmp_path / "vllm", files, target.config)
    assert not (tmp_path / "vllm").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_folders_keep_the_precision(
    dtype: torch.dtype, medusa_tensors: NewTensors, target: TargetWeights, tmp_path: Path
) -> None:
    """Catches numbers rounded, and files twice as large as they were."""
    tensors = {name: (tensor / 3).to(dtype) for name, tensor in medusa_tensors().items()}
    write_medusa_folder(tmp_path / "folder", medusa(tmp_path / "head", tensors), target.config)
    written = load_file(tmp_path / "folder" / "medusa_lm_head.safetensors")
    assert all(torch.equal(written[name], tensor) and written[name].dtype == dtype for name, tensor in tensors.items())


def test_nothing_is_left_of_a_failure(medusa_tensors: NewTensors, target: TargetWeights, tmp_path: Path) -> None:
    """Catches half a head left where a whole one is looked for."""
    tensors = medusa_tensors()
    tensors["2.1.weight"][3, 4] = torch.nan
    files = medusa(tmp_path / "head", tensors)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"2\.1\.weight holds NaN|lm_heads\.2\.weight holds NaN"):
        write_heads_file(out / "h.heads", files, target.config)
    with pytest.raises(ValueError, match="holds NaN"):
        write_medusa_folder(out / "folder", files, target.config)
    assert not out.exists() or list(out.iterdir()) == []


def test_existing_folders_are_kept(medusa_tensors: NewTensors, target: TargetWeights, tmp_path: Path) -> None:
    """Catches a folder of the user's overwritten."""
    files = medusa(tmp_path / "head", medusa_tensors())
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        write_medusa_folder(tmp_path, files, target.config)
    with pytest.raises(ValueError, match=r"must end in \.heads"):
        write_heads_file(tmp_path / "out.bin", files, target.config)


def test_numbers_that_float32_rounds_are_refused(
    tiny_models: TinyModels, target: TargetWeights, tmp_path: Path
) -> None:
    """Catches a vocabulary map stored as other ids."""
    folder = tiny_models.head(target.folder, draft_vocab_size=23)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][3] = 1 << 24
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tensor d2t holds a number of 16777216 or more"):
        write_heads_file(tmp_path / "out.heads", open_head(folder), target.config)
    assert list(tmp_path.iterdir()) == []


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["eyas", *args])
    with pytest.raises(SystemExit) as ended:
        commands.run()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_convert_command(
    medusa_tensors: NewTensors,
    target: TargetWeights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a format that the command line takes but does not write, and an error that is no single line."""
    medusa(tmp_path / "head", medusa_tensors())
    expected = logits(tmp_path / "head", target)
    source = str(tmp_path / "head")
    for out, layout in (("out.heads", "heads"), ("folder", "folder"), ("vllm", "vllm")):
        path = tmp_path / out
        args = ["convert", source, str(path), "--format", layout, "--target", str(target.folder)]
        assert run(monkeypatch, *args) == 0
        torch.testing.assert_close(logits(path, target), expected)
        source = str(path)
    capsys.readouterr()
    assert run(monkeypatch, "convert", source, str(tmp_path), "--format", "folder", "--target", str(target.folder)) == 2
    assert capsys.readouterr().err.count("\n") == 1
