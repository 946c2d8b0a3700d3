"""The worker group over actors that are threads of this process: wiring, failures at start, what is left behind."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray import exceptions

from eyas.deployments import worker_group
from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import TreeShape
from eyas.deployments.worker_group import WorkerGroup, WorkersLostError
from eyas.workers import actors
from eyas.workers.loading import EngineSpec
from eyas.workers.memory import MemoryReport, head_page_bytes, target_page_bytes
from eyas.workers.messages import DecodeItem, StepPlan
from eyas.workers.sampling import SamplingParams

# A real worker leaves the sockets it connected to the end of its process.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed socket:ResourceWarning")


class ThreadActor:
    """One thread that makes the object and runs its methods in order."""

    def __init__(self, make: Any) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._made = self._thread.submit(make)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self._thread.submit(lambda: getattr(self._made.result(), name)(*arguments))
        )


class FakeRay:
    """The part of Ray that a worker group uses."""

    exceptions = exceptions

    def __init__(self) -> None:
        self.killed: list[ThreadActor] = []

    def remote(self, **_: Any) -> Any:
        def decorate(actor_class: Any) -> Any:
            make = SimpleNamespace(remote=lambda *arguments: ThreadActor(lambda: actor_class(*arguments)))
            return SimpleNamespace(options=lambda **_: make)

        return decorate

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [self.get(reference, timeout) for reference in references]
        try:
            return references.result(timeout)
        except Exception as error:
            raise exceptions.RayTaskError("load", "a stack of the worker", error) from None

    @staticmethod
    def wait(references: list[Future[Any]], num_returns: int, timeout: float) -> tuple[Any, Any]:
        done, waiting = wait(references, timeout)
        return list(done), list(waiting)

    def kill(self, actor: ThreadActor) -> None:
        self.killed.append(actor)
        actor._made.result().context.destroy(linger=0)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    """Also gives temporary files a folder of their own."""
    fake = FakeRay()
    monkeypatch.setattr(worker_group, "ray", fake)
    monkeypatch.setattr(worker_group, "in_bundle", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return fake


def new_spec(tiny_models: Any) -> EngineSpec:
    target = tiny_models.target()
    return EngineSpec(str(target), str(tiny_models.head(target)), "float32", "cpu", 64, 4, num_threads=1)


def new_group(spec: EngineSpec) -> WorkerGroup:
    return WorkerGroup(spec, None, max_rows=64, gpus_per_rank=0.0, drafter_gpu_fraction=0.1)  # type: ignore[arg-type]


def test_a_stopped_group_leaves_nothing(fake_ray: FakeRay, tiny_models: Any, tmp_path: Path) -> None:
    """Socket folders that pile up in /tmp, one per process and start, and actors that outlive their group."""
    group = new_group(new_spec(tiny_models))
    engine = OfflineEngine(group, PageAllocator(64, 4), TreeShape(6, 3, 2), max_batch_size=2)
    (output,) = engine.generate([OfflineRequest([3, 5, 7], SamplingParams(), 9)])
    assert len(output.token_ids) == 9
    group.stop()
    group.stop()
    assert len(set(fake_ray.killed)) == 2
    assert list(tmp_path.glob("eyas-*")) == []


def test_a_failure_while_loading_names_its_cause(fake_ray: FakeRay, tiny_models: Any, tmp_path: Path) -> None:
    """A group that cannot start leaving actors and sockets behind, or hiding why."""
    spec = new_spec(tiny_models)
    assert spec.head_folder is not None
    Path(spec.head_folder, "model.safetensors").unlink()
    with pytest.raises(WorkersLostError, match="a worker failed while it was loaded: .*safetensors"):
        new_group(spec)
    assert len(fake_ray.killed) == 2
    assert list(tmp_path.glob("eyas-*")) == []


def test_pages_follow_from_the_memory_all_workers_leave(
    fake_ray: FakeRay, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that plans with more pages than its workers hold, or a drafter whose pool was not counted."""
    monkeypatch.setattr(actors, "measure", lambda device, page_bytes: MemoryReport("a", 1 << 20, 1 << 21, page_bytes))
    spec = msgspec.structs.replace(new_spec(tiny_models), num_pages=None, gpu_memory_fraction=0.75)
    group = new_group(spec)
    loaded = [worker._made.result() for worker in (*group._ranks, group._drafter)]
    page_bytes = target_page_bytes(loaded[0]._model, 4) + head_page_bytes(loaded[1]._head, 4)
    assert group.num_pages == (1 << 19) // page_bytes - 1
    assert [worker._runner.layout.num_pages for worker in loaded] == [group.num_pages] * 2
    group.stop()


def test_too_little_memory_is_refused_and_leaves_nothing(
    fake_ray: FakeRay, tiny_models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Actors that hold their GPUs although the engine never came up."""
    monkeypatch.setattr(actors, "measure", lambda device, page_bytes: MemoryReport("a", 1000, 10_000, page_bytes))
    with pytest.raises(ValueError, match="gpu_memory_fraction: one request needs at least"):
        new_group(msgspec.structs.replace(new_spec(tiny_models), num_pages=None))
    assert len(fake_ray.killed) == 2
    assert list(tmp_path.glob("eyas-*")) == []


def test_an_allocator_that_cannot_share_is_refused(
    fake_ray: FakeRay, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads its weights and fails in its first step."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    new_group(new_spec(tiny_models)).stop()  # on a CPU the variable means nothing
    with pytest.raises(WorkersLostError, match="PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True"):
        new_group(msgspec.structs.replace(new_spec(tiny_models), device="cuda"))


def test_a_lost_worker_is_noticed_at_once(fake_ray: FakeRay, tiny_models: Any) -> None:
    """A step that waits for its timeout although the worker's loop has ended."""
    group = new_group(new_spec(tiny_models))
    group._outboxes[-1].send(worker_group.Shutdown())
    with pytest.raises(WorkersLostError, match="left its loop"):
        group.receive()
    group.stop()


def test_what_killed_a_worker_is_told_in_one_line(fake_ray: FakeRay, tiny_models: Any) -> None:
    """A stack trace with the server's paths in every client's error."""
    group = new_group(new_spec(tiny_models))
    with pytest.raises(WorkersLostError, match=r"^a worker failed: 7$"):
        group.step(StepPlan(1, decode=[DecodeItem(7, 1)]))
    group.stop()
