"""`eyas eval` from the command line to its files, on a tiny target and a head that often agrees with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from safetensors.torch import load_file, save_file

from eyas.deployments import commands, evaluation, local_engine
from eyas.deployments.bench import bench_offline
from eyas.deployments.settings import EngineSettings
from eyas.models.head_loading import open_head
from eyas.models.head_writing import save_prior

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.deployments.conftest import Following

LINES = [
    {"category": "writing", "turns": ["Write.", "Again."]},
    {"category": "[math]", "turns": ["1 + 1 = ?"]},
    {"category": "writing", "messages": [{"role": "user", "content": "A poem, please."}]},
    {"prompt": "Once upon a time"},
]
COUNT = {"type": "integer", "minimum": 0}
SHARE = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
LENGTH = {"type": "number", "minimum": 0}
MS = {"type": ["number", "null"], "exclusiveMinimum": 0}
TEXT = {"type": "string", "minLength": 1}
OPTIONAL_TEXT = {"type": ["string", "null"]}
SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}


def exactly(**properties: Any) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


CURVE = exactly(
    expected_calibration_error=SHARE,
    num_edges=COUNT,
    buckets=listed(
        exactly(low=SHARE, high=SHARE, num_edges=COUNT, num_accepted=COUNT, mean_probability=SHARE, acceptance=SHARE)
    ),
)
SHAPE = exactly(
    shape={"type": "string", "pattern": "^[0-9]+x[0-9]+x[0-9]+$"},
    num_nodes=COUNT,
    draft_depth=COUNT,
    width=COUNT,
    is_chain={"type": "boolean"},
    acceptance_length=LENGTH,
    num_steps=COUNT,
    num_tokens=COUNT,
    num_cut_steps=COUNT,
    num_accepted=COUNT,
    draft_ms=MS,
    verify_ms=MS,
    by_depth=listed(exactly(depth=COUNT, num_proposed=COUNT, num_accepted=COUNT, acceptance=SHARE, reached=SHARE)),
    by_rank=listed(listed(exactly(rank=COUNT, num_proposed=COUNT, num_accepted=COUNT, acceptance=SHARE))),
    calibration=exactly(raw=CURVE, used={"anyOf": [CURVE, {"type": "null"}]}),
    by_category={
        "type": "object",
        "additionalProperties": exactly(num_prompts=COUNT, num_steps=COUNT, num_tokens=COUNT, acceptance_length=LENGTH),
    },
)
SCHEMA = exactly(
    version={"const": 1},
    machine=exactly(cpu=TEXT, cores=COUNT, platform=TEXT, gpu=OPTIONAL_TEXT, torch=TEXT, python=TEXT),
    versions=exactly(eyas=OPTIONAL_TEXT, torch=OPTIONAL_TEXT, transformers=OPTIONAL_TEXT),
    settings=exactly(
        model=TEXT, dtype=TEXT, device=TEXT, temperature=LENGTH, seed=COUNT, max_tokens=COUNT, batch_size=COUNT,
        threads=COUNT, acceptance_prior={"type": "boolean"},
    ),
    prompts=exactly(file=TEXT, sha256=SHA256, num_prompts=COUNT),
    heads=listed(
        exactly(name=TEXT, path=TEXT, kind=TEXT, format=TEXT, num_bytes=COUNT, sha256=SHA256, shapes=listed(SHAPE))
    ),
)  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES))
    return file


@pytest.fixture
def follow(following: Following, monkeypatch: pytest.MonkeyPatch) -> Following:
    """Every head that is loaded is the one that often agrees."""
    for module in (evaluation, local_engine):
        monkeypatch.setattr(module, "load_draft_head", lambda spec: following.head)
    return following


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["eyas", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        commands.run()
    code = exit_.value.code
    assert isinstance(code, int)
    return code


def eval_arguments(following: Following, prompts: Path, *more: str | Path) -> list[str | Path]:
    base = ["--prompts", prompts, "--target", following.target_folder, "--dtype", "float32", "--threads", "1"]
    return ["eval", following.head_folder, *base, "--skip-probe", *more]


def evaluated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, following: Following, prompts: Path, *more: str
) -> dict[str, Any]:
    file = tmp_path / "out.json"
    assert run_cli(monkeypatch, *eval_arguments(following, prompts, "--json", file, *more)) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    return report


def test_everything_is_written(
    follow: Following,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a file or table that is not made, and keys that are missing, new or not documented."""
    json_file, png_file = tmp_path / "out.json", tmp_path / "out.png"
    shapes = ("--shapes", "9x3x3,4x3x1", "--max-tokens", "12", "--batch", "2", "--temperature", "0.6", "--seed", "5")
    outputs = ("--json", json_file, "--png", png_file)
    assert run_cli(monkeypatch, *eval_arguments(follow, prompts, *shapes, *outputs)) == 0
    report = json.loads(json_file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert png_file.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    tree, chain = report["heads"][0]["shapes"]
    for expected in (
        "9x3x3",
        "4x3x1",
        "chain",
        "writing",
        "[math]",
        f"{tree['acceptance_length']:.3f}",
        "depth 3",
        "rank 3",
    ):
        assert expected in printed
    documented = set(re.findall(r"\w+", evaluation.__doc__ or ""))
    keys = set(re.findall(r'"(\w+)": ', json_file.read_text())) - {"cpu", "cores", "platform", "gpu", "python"}
    assert keys - documented - set(tree["by_category"]) == set()
    assert report["prompts"]["sha256"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert report["settings"]["seed"] == 5
    assert (tree["is_chain"], chain["is_chain"]) == (False, True)


def test_figures_agree_with_each_other_and_with_bench(
    follow: Following, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an acceptance length of its own, and depths, ranks, edges and categories that do not add up to it."""
    report = evaluated(
        monkeypatch, tmp_path, follow, prompts, "--shapes", "9x3x3,4x3x1", "--max-tokens", "17", "--temperature", "0.9"
    )
    for shape in report["heads"][0]["shapes"]:
        settings = EngineSettings(
            model=str(follow.target_folder), head=str(follow.head_folder), dtype="float32", threads_per_worker=1,
            node_budget=shape["num_nodes"], draft_depth=shape["draft_depth"], width=shape["width"], max_batch_size=1,
            probe=False,
        )  # fmt: skip
        bench = bench_offline(settings, prompts, 17, 0.9, 0, False, None)
        assert shape["acceptance_length"] == bench["acceptance_length"] > 1.3
        assert shape["num_steps"] == bench["steps"]
        assert shape["num_accepted"] == shape["num_tokens"] - shape["num_steps"] + shape["num_cut_steps"]
        assert sum(depth["num_accepted"] for depth in shape["by_depth"]) == shape["num_accepted"]
        for depth, ranks in zip(shape["by_depth"], shape["by_rank"], strict=True):
            assert sum(rank["num_accepted"] for rank in ranks) == depth["num_accepted"]
            assert depth["reached"] == depth["num_accepted"] / shape["num_steps"]
            assert max(rank["num_proposed"] for rank in ranks) <= depth["num_proposed"]
        assert [len(ranks) for ranks in shape["by_rank"]] == [shape["width"]] * 3
        curve = shape["calibration"]["raw"]
        assert sum(bucket["num_accepted"] for bucket in curve["buckets"]) == shape["num_accepted"]
        assert curve["num_edges"] == sum(rank["num_proposed"] for ranks in shape["by_rank"] for rank in ranks)
        categories = shape["by_category"]
        assert {name: each["num_prompts"] for name, each in categories.items()} == {
            "writing": 2,
            "[math]": 1,
            "(none)": 1,
        }
        assert sum(each["num_tokens"] for each in categories.values()) == shape["num_tokens"]
        assert sum(each["num_steps"] for each in categories.values()) == shape["num_steps"]


def test_priors_are_reported_beside_raw_scores(
    follow: Following, new_prior: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches a prior's scores reported as the head's, and figures of a prior where there is none."""
    png_file = str(tmp_path / "out.png")
    more = ("--shapes", "9x3x3,6x3x2", "--max-tokens", "12", "--temperature", "0.9", "--png", png_file)
    without = evaluated(monkeypatch, tmp_path, follow, prompts, *more)
    assert [shape["calibration"]["used"] for shape in without["heads"][0]["shapes"]] == [None, None]
    monkeypatch.setattr(follow.head, "acceptance_prior", new_prior())
    capsys.readouterr()
    report = evaluated(monkeypatch, tmp_path, follow, prompts, *more)
    assert "the head's acceptance prior" in capsys.readouterr().out
    for shape in report["heads"][0]["shapes"]:
        raw, used = shape["calibration"]["raw"], shape["calibration"]["used"]
        assert raw["num_edges"] == used["num_edges"] > 0
        assert [each["num_edges"] for each in raw["buckets"]] != [each["num_edges"] for each in used["buckets"]]
        assert raw["expected_calibration_error"] != used["expected_calibration_error"]


def test_priors_can_be_left_out(
    following: Following, new_prior: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an option that is parsed and forgotten."""
    folder = tmp_path / "head"
    shutil.copytree(following.head_folder, folder)
    save_prior(folder, new_prior())
    for options, has_prior in (((), True), (("--raw-scores",), False)):
        with_prior = dataclasses.replace(following, head_folder=folder)
        more = ("--shapes", "4x3x1", "--max-tokens", "5", "--limit", "1", *options)
        report = evaluated(monkeypatch, tmp_path, with_prior, prompts, *more)
        (shape,) = report["heads"][0]["shapes"]
        assert (shape["calibration"]["used"] is not None) == report["settings"]["acceptance_prior"] == has_prior


def test_texts_end_within_accepted_tokens(
    follow: Following, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches drafts counted past the limit of an answer."""
    report = evaluated(monkeypatch, tmp_path, follow, prompts, "--shapes", "9x3x3", "--max-tokens", "3")
    (shape,) = report["heads"][0]["shapes"]
    assert shape["num_tokens"] == len(LINES) * 2
    assert shape["num_cut_steps"] > 0
    assert len(shape["by_depth"]) <= 2


def test_answers_of_one_token_are_never_drafted_for(
    follow: Following, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a report, tables or a picture that fail without a single verify step."""
    picture = tmp_path / "out.png"
    report = evaluated(
        monkeypatch, tmp_path, follow, prompts, "--shapes", "4x3x1", "--max-tokens", "1", "--png", str(picture)
    )
    (shape,) = report["heads"][0]["shapes"]
    assert (shape["num_steps"], shape["acceptance_length"], shape["verify_ms"]) == (0, 0.0, None)
    assert (shape["by_depth"], shape["calibration"]["raw"]["expected_calibration_error"]) == ([], None)
    assert picture.exists()


def test_heads_stand_side_by_side(
    following: Following, tiny_models: TinyModels, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Catches figures of one head under the name of another, and a head that is loaded from the wrong place."""
    other = tiny_models.head(following.target_folder, seed=3)
    monkeypatch.setattr(
        local_engine, "load_draft_head",
        lambda spec: following.head if spec.head_folder == str(following.head_folder) else load_draft_head(spec),
    )  # fmt: skip
    load_draft_head = evaluation.load_draft_head
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    arguments = eval_arguments(
        following, prompts, "--shapes", "6x3x2,4x3x1", "--max-tokens", "9", "--limit", "2", *files
    )
    arguments[2:2] = [other, "--names", "good,bad"]
    assert run_cli(monkeypatch, *arguments) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(report, SCHEMA)
    good, bad = report["heads"]
    assert (good["name"], good["path"]) == ("good", str(following.head_folder))
    assert (bad["name"], bad["path"]) == ("bad", str(other))
    assert good["sha256"] != bad["sha256"]
    for good_shape, bad_shape in zip(good["shapes"], bad["shapes"], strict=True):
        assert good_shape["acceptance_length"] > bad_shape["acceptance_length"] >= 1.0
    assert report["prompts"]["num_prompts"] == 2
    printed = capsys.readouterr().out
    assert "good" in printed
    assert "bad" in printed


def test_the_hash_is_of_the_weights(following: Following, tmp_path: Path) -> None:
    """Catches a hash that a copied folder changes, and one that a changed weight does not."""
    copy = tmp_path / "copy"
    copy.mkdir()
    tensors = load_file(following.head_folder / "model.safetensors")
    (copy / "config.json").write_text((following.head_folder / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors")
    first = evaluation.weights_hash(open_head(following.head_folder))
    assert evaluation.weights_hash(open_head(copy)) == first
    tensors["norm.weight"][-1] += 1e-3
    save_file(tensors, copy / "model.safetensors")
    assert evaluation.weights_hash(open_head(copy)) != first
