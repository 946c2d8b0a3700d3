"""The report of `eyas bench offline`, from random models in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas.deployments import bench
from eyas.deployments.offline import OfflineEngine
from eyas.deployments.pages import PageAllocator
from eyas.deployments.settings import EngineSettings
from eyas.workers.loading import EngineSpec, load_drafter, load_target
from eyas.workers.local import LocalWorkers

KEYS = "settings machine acceptance_length steps tokens_per_s draft_ms verify_ms other_ms outputs"


@pytest.fixture
def prompts(tiny_models: Any, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A prompt file; `open_engine` gives random models that speak bytes."""
    target = tiny_models.target(vocab_size=257)
    spec = EngineSpec(str(target), str(tiny_models.head(target)), "float32", "cpu", 64, 4, num_threads=1)

    @contextmanager
    def open_engine(settings: EngineSettings) -> Iterator[tuple[OfflineEngine, Any]]:
        workers = LocalWorkers(load_target(spec), load_drafter(spec) if settings.speculate else None)
        shape = settings.tree_shape()
        yield OfflineEngine(workers, PageAllocator(64, 4), shape, settings.max_batch_size), byte_tokenizer

    monkeypatch.setattr(bench, "open_engine", open_engine)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "two of them", "3")))
    return file


def test_report_has_the_keys_others_rely_on(prompts: Path) -> None:
    """Figures that every later claim is measured by, renamed or not adding up to the texts they come with."""
    report = bench.bench_offline(EngineSettings(max_batch_size=2), prompts, 9, 0.0, 0, True, None)
    assert list(report) == KEYS.split()
    assert [len(output["token_ids"]) for output in report["outputs"]] == [9, 9, 9]
    assert all(set(output) == {"token_ids", "text"} for output in report["outputs"])
    # The first token of each answer comes from its prompt's pass.
    assert report["acceptance_length"] * report["steps"] == pytest.approx(3 * 8)
    assert min(report[name] for name in ("tokens_per_s", "draft_ms", "verify_ms", "other_ms")) > 0
    json.dumps(report)


def test_plain_decoding_accepts_one_token_a_step(prompts: Path) -> None:
    """A baseline flattered or burdened: another text, or warm-up steps among the counted ones."""
    trees = bench.bench_offline(EngineSettings(), prompts, 9, 0.7, 5, True, 2)
    plain = bench.bench_offline(EngineSettings(speculate=False), prompts, 9, 0.7, 5, True, 2)
    assert plain["outputs"] == trees["outputs"]
    assert (plain["acceptance_length"], plain["steps"]) == (1.0, 2 * 8)
    assert plain["draft_ms"] < plain["verify_ms"]
