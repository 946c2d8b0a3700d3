from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from eyas.deployments.scheduler import TreeShape
from eyas.models.linear import Linear
from eyas.workers.buckets import GraphLimits
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.loading import EngineSpec, StepLimits, load_drafter, load_target
from eyas.workers.local import LocalWorkers

if TYPE_CHECKING:
    from tests.conftest import TinyModels


def spec_of(target: str, head: str | None, **changes: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "target_folder": target,
        "head_folder": head,
        "dtype": "float32",
        "device": "cpu",
        "num_pages": 8,
        "page_size": 16,
        "num_threads": 1,
    }
    return EngineSpec(**fields | changes)


def test_both_sides_share_layout_and_layers(tiny_models: TinyModels) -> None:
    """Catches a target that publishes other states than the head reads, or pools whose slots do not match."""
    target = tiny_models.target()
    spec = spec_of(str(target), str(tiny_models.head(target)))
    spec.validate()
    runner, drafter = load_target(spec), load_drafter(spec)
    assert drafter is not None
    assert runner.capture == spec.capture() == drafter.head.config.aux_layers == (2, 3, 4)
    assert runner.layout == drafter.layout == spec.layout == PoolLayout(8, 16)
    assert runner.pool.keys[0].shape[0] == drafter.pool.keys[0].shape[0] == 9 * 16
    assert runner.dtype == drafter.dtype == torch.float32


def test_engine_without_a_head(tiny_models: TinyModels) -> None:
    """Catches features captured for nobody."""
    spec = spec_of(str(tiny_models.target()), None)
    spec.validate()
    assert load_drafter(spec) is None
    assert load_target(spec).capture == ()


def test_bfloat16_is_packed_on_both_sides(tiny_models: TinyModels) -> None:
    """Catches a served model that reads its weights in the slow layout."""
    target = tiny_models.target()
    spec = spec_of(str(target), str(tiny_models.head(target)), dtype="bfloat16")
    drafter = load_drafter(spec)
    assert drafter is not None
    linears = [m for model in (load_target(spec).model, drafter.head) for m in model.modules() if isinstance(m, Linear)]
    assert len(linears) == 4 * 4 + 1 + 6
    assert all((linear.packed is not None) == torch.backends.mkldnn.is_available() for linear in linears)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, r"dtype: float16 is not supported; use one of \['bfloat16', 'float32'\]"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3"),
        ({"target_folder": "/nowhere"}, "config.json does not exist"),
        ({"head_folder": "/nowhere"}, "head: /nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_refused_at_start(changes: dict[str, Any], message: str, tiny_models: TinyModels) -> None:
    """Catches an engine that starts its actors and dies in the first of them."""
    target = tiny_models.target()
    spec = msgspec.structs.replace(spec_of(str(target), str(tiny_models.head(target))), **changes)
    with pytest.raises(ValueError, match=message):
        spec.validate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_device_is_named(tiny_models: TinyModels) -> None:
    """Catches a traceback out of torch instead of the setting to change."""
    with pytest.raises(ValueError, match="device: cuda was asked for, .* use cpu"):
        load_target(spec_of(str(tiny_models.target()), None, device="cuda"))


def test_a_process_without_a_device_may_check_settings(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a router, from which Ray hides all GPUs, that refuses the device its workers have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec_of(str(tiny_models.target()), None, device="cuda").validate()


def test_spec_survives_the_wire(tiny_models: TinyModels) -> None:
    """Catches a field that an actor's process would not get."""
    spec = spec_of("/a", "/b", dtype="bfloat16", tensor_parallel_size=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=EngineSpec) == spec


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, over the garbage in padding rows
def test_named_backends_are_the_ones_that_run(models: Any, jobs: Any, plain_texts: Any, new_generation: Any) -> None:
    """Catches a backend that is chosen, checked, and then not used."""
    spec = EngineSpec(
        str(models.target_folder), str(models.head_folder), "float32", "cpu", 40, 8, num_threads=1,
        attention_backend="triton", kernel_backend="triton",
    )  # fmt: skip
    target, drafter = load_target(spec), load_drafter(spec)
    assert drafter is not None
    for runner in (target, drafter):
        assert type(runner.attention).__name__ == "TritonAttention"
        assert runner.kernels.verify_walk.__module__ == "eyas.kernels.triton_verify"
    generation = new_generation(LocalWorkers(target, drafter), TreeShape(5, 2, 2))
    generation.submit(replace(jobs[1], max_tokens=4))
    assert generation.run() == [plain_texts[1][:4]]


def test_recorded_steps_are_sized_by_the_engine(models: Any) -> None:
    """Catches page tables too short for the longest text and its tree, and recordings on a device without graphs."""
    limits = StepLimits(max_batch=4, max_nodes=8, draft_depth=3, width=2, num_extra_slots=16)
    spec = EngineSpec(
        str(models.target_folder), None, "bfloat16", "cuda", 100, 16, num_threads=1, attention_backend="triton",
        kernel_backend="triton", step_limits=limits,
    )  # fmt: skip
    longest = spec.target_config().max_positions
    assert spec.graph_limits() == GraphLimits(4, 8, 3, -(-(longest + 16) // 16), 2)
    assert spec.with_pages(5).graph_limits() == GraphLimits(4, 8, 3, 5, 2)
    for eager in (msgspec.structs.replace(spec, cuda_graphs=False), msgspec.structs.replace(spec, device="cpu")):
        assert eager.graph_limits() is None
