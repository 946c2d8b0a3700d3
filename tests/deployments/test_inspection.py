from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from eyas.deployments.inspection import inspect_path
from eyas.models.head_files import HeadOptions

if TYPE_CHECKING:
    from tests.conftest import TinyModels

HIDDEN, INNER, HEAD_INNER, VOCAB_SIZE, DRAFT_VOCAB_SIZE, NUM_LAYERS = 32, 48, 40, 61, 23, 4
QUERY_ROWS, KV_ROWS = 32, 16


@pytest.fixture(scope="module")
def target(tiny_models: TinyModels) -> Path:
    return tiny_models.target()


@pytest.fixture
def head(tiny_models: TinyModels, target: Path) -> Path:
    return tiny_models.head(target, draft_vocab_size=DRAFT_VOCAB_SIZE)


def test_cost_counts_the_weights_of_one_level(head: Path, target: Path) -> None:
    """Catches a cost that takes the fusion of true features, or the embedding, for part of every drafted level."""
    found = inspect_path(head, target, HeadOptions())
    layer = (QUERY_ROWS + 2 * KV_ROWS) * 2 * HIDDEN + QUERY_ROWS * HIDDEN + 3 * HEAD_INNER * HIDDEN
    target_layer = (QUERY_ROWS + 2 * KV_ROWS) * HIDDEN + QUERY_ROWS * HIDDEN + 3 * INNER * HIDDEN + 2 * HIDDEN
    target_pass = NUM_LAYERS * target_layer + HIDDEN + VOCAB_SIZE * HIDDEN
    assert found.problems == []
    assert found.cost == pytest.approx((layer + DRAFT_VOCAB_SIZE * HIDDEN) / target_pass)
    assert found.extend_cost == pytest.approx((layer + 3 * HIDDEN * HIDDEN) / target_pass)


def test_what_a_head_is(head: Path, target: Path) -> None:
    """Catches figures of the file instead of the normalised ones, and a size that forgets the maps."""
    found = inspect_path(head, target, HeadOptions())
    tensors = load_file(head / "model.safetensors")
    assert "EAGLE-3" in found.what
    assert found.fields["reads target states"] == [2, 3, 4]
    assert found.fields["draft_vocab_size"] == DRAFT_VOCAB_SIZE
    assert found.num_tensors == len(tensors)
    assert found.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_what_is_wrong_is_listed_and_the_rest_still_shown(head: Path, target: Path) -> None:
    """Catches an inspector that ends where it is needed most."""
    tensors = load_file(head / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, head / "model.safetensors")
    found = inspect_path(head, target, HeadOptions())
    assert any("d2t is missing" in problem for problem in found.problems)
    assert found.fields["hidden_size"] == HIDDEN
    assert found.cost is None


def test_unreadable_files_are_a_problem_not_a_crash(tmp_path: Path) -> None:
    """Catches a stack trace for a path that does not exist, is empty, or holds broken JSON."""
    for path in (tmp_path / "nowhere", tmp_path):
        assert inspect_path(path, None, HeadOptions()).problems
    (tmp_path / "config.json").write_text("{")
    assert any("not valid JSON" in problem for problem in inspect_path(tmp_path, None, HeadOptions()).problems)


def test_a_head_without_a_target_is_shown_as_its_files_say(head: Path) -> None:
    """Catches a check against a target nobody named."""
    found = inspect_path(head, None, HeadOptions())
    assert found.fields["draft_vocab_size"] == DRAFT_VOCAB_SIZE
    assert any("--target" in problem for problem in found.problems)


def test_a_target_is_recognised(target: Path) -> None:
    """Catches a target taken for a broken head."""
    found = inspect_path(target, None, HeadOptions())
    assert "LlamaForCausalLM" in found.what
    assert found.problems == []
    assert found.fields["tensor_parallel_sizes"] == [1, 2]
    assert found.num_bytes == sum(tensor.nbytes for tensor in load_file(target / "model.safetensors").values())


def test_fields_are_json(head: Path, target: Path) -> None:
    """Catches a value that `--json` cannot print."""
    json.dumps(inspect_path(head, target, HeadOptions()).fields)
