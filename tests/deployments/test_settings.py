"""Engine settings: what cannot work is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.deployments.settings import EngineSettings


def test_no_speculation_is_one_node() -> None:
    """A drafter started for nothing, or pages reserved for trees that never come."""
    assert EngineSettings(speculate=False).tree_shape().node_budget == 1
    assert EngineSettings(speculate=False).tree_shape().num_block_slots == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node_budgets": 8}, "node_budgets"),
        ({"node_budget": 0}, "node_budget"),
        ({"dtype": "float16"}, "dtype"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"num_pages": "many"}, "num_pages"),
        ({"draft_depth": 1000}, "draft_depth"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, object], message: str) -> None:
    """A misspelt or impossible option that is silently ignored."""
    with pytest.raises(ValueError, match=message):
        EngineSettings.model_validate(fields)


def test_a_budget_beyond_the_candidates_is_refused_with_the_remedy() -> None:
    """A shape that can never be grown would be cut silently."""
    with pytest.raises(ValueError, match=r"node_budget: 16 nodes need 15 candidates.*only 5; lower it to 6"):
        EngineSettings(node_budget=16, width=1, draft_depth=5).tree_shape()


def test_unknown_model_and_head_are_named() -> None:
    """A late failure inside a worker instead of one line at start."""
    with pytest.raises(ValueError, match="model: nowhere"):
        EngineSettings(model="nowhere").engine_spec()


def test_a_pool_too_small_is_refused_at_start(tiny_models: Any) -> None:
    """A server that starts and can then take no request at all."""
    with pytest.raises(ValueError, match="num_pages: 1 pages of 2 tokens hold no request"):
        EngineSettings(model=str(tiny_models.target()), speculate=False, num_pages=1, page_size=2).engine_spec()


def test_pages_are_measured_only_on_a_gpu(tiny_models: Any) -> None:
    """A pool of a laptop's size on a GPU, or a CPU server that waits for a measurement."""
    model = str(tiny_models.target())
    on_cuda = {"device": "cuda", "kernel_backend": "reference", "cuda_graphs": False}  # where Triton is interpreted
    pages = [
        EngineSettings(model=model, speculate=False, **fields).engine_spec().num_pages
        for fields in ({}, {"num_pages": 9}, on_cuda, on_cuda | {"num_pages": 9})
    ]
    assert pages == [1024, 9, None, 9]


def test_the_least_number_of_pages_holds_one_request(tiny_models: Any) -> None:
    """A refusal at start that lets a pool pass in which no request can run, or the reverse."""
    for page_size, node_budget in ((1, 8), (16, 8), (4, 13)):
        settings = EngineSettings(model=str(tiny_models.target()), page_size=page_size, node_budget=node_budget)
        spec = EngineSettings(model=settings.model, speculate=False).engine_spec()
        settings.new_scheduler(spec, settings.min_pages())
        with pytest.raises(ValueError, match="hold no request"):
            settings.new_scheduler(spec, settings.min_pages() - 1)


def test_bundles_hold_the_engine() -> None:
    """A bundle without room for its actors leaves them pending for ever."""
    bundles = EngineSettings(tensor_parallel_size=3, threads_per_worker=2).placement_bundles()
    assert len(bundles) == 3
    assert bundles[0]["CPU"] == 5.0
    assert bundles[1]["CPU"] == 2.0
