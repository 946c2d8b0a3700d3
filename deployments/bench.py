"""`eyas bench offline`: how fast and how well accepted, as one JSON object.

Times are wall times of steps that verify and do not prefill; `tokens_per_s` is all new tokens over the whole run,
prompts included. `acceptance_length` is new tokens per verify step; the first token of each answer comes from the
prompt's pass and is not counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.deployments.local_engine import open_engine
from eyas.deployments.machine import machine
from eyas.deployments.offline import OfflineOutput, OfflineRequest, StepTimes, acceptance_length, seeded_requests
from eyas.deployments.progress import progress_bar
from eyas.deployments.prompts import read_prompts
from eyas.deployments.settings import EngineSettings
from eyas.workers.sampling import SamplingParams

_WARM_UP_TOKENS = 16


def bench_offline(
    settings: EngineSettings, prompts_file: Path, max_tokens: int, temperature: float, seed: int, ignore_eos: bool,
    limit: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Answer every prompt of a file and report.

    Args:
        seed: prompt i is sampled with `seed + i`.
        limit: use only the first so many prompts.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: must be at least 1, got {limit}")
    with open_engine(settings) as (engine, tokenizer):
        prompts = read_prompts(prompts_file, tokenizer)[:limit]
        stop = frozenset() if ignore_eos else tokenizer.eos_token_ids
        requests = seeded_requests(prompts, temperature, seed, max_tokens, stop)
        warm_up = [OfflineRequest(prompts[0], SamplingParams(temperature, 1.0, seed), min(max_tokens, _WARM_UP_TOKENS))]
        engine.generate(warm_up * min(settings.max_batch_size, len(prompts)))
        engine.times = StepTimes()
        with progress_bar() as progress:
            task = progress.add_task("answers", total=len(requests), note="")
            outputs = engine.generate(requests, on_finish=lambda: progress.advance(task))
        times = engine.times
        texts = [tokenizer.decode(output.token_ids) for output in outputs]
    return {
        "settings": {
            **settings.model_dump(),
            "prompts": str(prompts_file),
            "num_prompts": len(prompts),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": ignore_eos,
        },
        "machine": machine(),
        **_figures(outputs, times),
        "outputs": [{"token_ids": output.token_ids, "text": text} for output, text in zip(outputs, texts, strict=True)],
    }


def _figures(outputs: list[OfflineOutput], times: StepTimes) -> dict[str, float]:
    num_request_steps = sum(output.num_steps for output in outputs)
    num_tokens = sum(len(output.token_ids) for output in outputs)
    steps = max(times.num_steps, 1)
    return {
        "acceptance_length": acceptance_length(outputs),
        "steps": num_request_steps,
        "tokens_per_s": num_tokens / times.elapsed_s,
        "draft_ms": times.draft_ms / steps,
        "verify_ms": times.verify_ms / steps,
        "other_ms": (times.total_ms - times.draft_ms - times.verify_ms) / steps,
    }


def print_report(report: dict[str, Any]) -> None:
    """The JSON object, on one line of standard output."""
    print(json.dumps(report))


def print_table(report: dict[str, Any]) -> None:
    """The figures for people."""
    table = Table(title=f"{report['settings']['model']}, {report['machine']['cpu']}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name in ("acceptance_length", "steps", "tokens_per_s", "draft_ms", "verify_ms", "other_ms"):
        table.add_row(name, f"{report[name]:.2f}")
    Console().print(table)
