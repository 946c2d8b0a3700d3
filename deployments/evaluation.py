"""How well draft heads are accepted: every verify step of the offline engine over a prompt file, as one JSON object.

    version                 of this layout: 1
    machine                 see `machine.machine`
    versions                of the packages eyas, torch and transformers; null for one that is not installed
    settings                model, dtype, device, temperature, seed, max_tokens, batch_size, threads; acceptance_prior:
                            whether heads that have one draft by it
    prompts                 file, sha256 of the file, num_prompts used
    heads[]                 in the order given
      name, path            as given; the name is the path's last part by default
      kind, format          as `eyas inspect` tells them
      num_bytes             of the stored tensors
      sha256                of the weights: names, shapes, and values in float32
      shapes[]              in the order given
        shape               nodes x depth x width
        num_nodes           verified per request and step, root included
        draft_depth, width  levels below the root, candidates kept per level
        is_chain            width is 1
        acceptance_length   tokens per verify step, those past the end of a text not counted; 0 without a step
        num_steps           verify steps, counted per request
        num_tokens          tokens of those steps; the first token of an answer comes from its prompt's pass
        num_cut_steps       steps in whose accepted tokens a text ended: they brought no token of the target's own
        num_accepted        draft tokens accepted: num_tokens - (num_steps - num_cut_steps)
        draft_ms, verify_ms medians over steps that verify and do not prefill; they depend on the machine; null
                            without such a step
        by_depth[]          depth (1 is the root's children); num_proposed: steps whose tree had a token there below
                            an accepted parent; num_accepted; acceptance: their ratio, null at 0 proposed; reached:
                            share of all steps that accepted a token there
        by_rank[][]         by depth, then by rank among siblings in the head's order (its first is rank 1): rank,
                            num_proposed, num_accepted, acceptance
        calibration
          raw               the head's probability of a token given its parent, against how often it was accepted
                            given that its parent was
          used              the same for the probability that trees grew by, from the head's acceptance prior; null
                            without one
            expected_calibration_error   in [0, 1]; null without an edge
            num_edges       edges whose parent was accepted
            buckets[]       low, high, num_edges, num_accepted, mean_probability, acceptance (null where empty)
        by_category         category (`UNCATEGORISED` where a line names none) to num_prompts, num_steps, num_tokens,
                            acceptance_length

Steps run eagerly also on CUDA, where recorded drafts could not be watched: their times are not those of a server.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eyas.deployments.acceptance_counts import AcceptanceCounts
from eyas.deployments.acceptance_figures import acceptance_figures
from eyas.deployments.local_engine import open_engine
from eyas.deployments.machine import machine, package_versions
from eyas.deployments.offline import seeded_requests
from eyas.deployments.progress import progress_bar
from eyas.deployments.prompt_categories import read_categories
from eyas.deployments.prompts import read_prompts
from eyas.deployments.scheduler import TreeShape
from eyas.deployments.settings import EngineSettings
from eyas.deployments.shapes import shape_name
from eyas.deployments.step_observer import ObservedWorkers
from eyas.deployments.tokenizer import Tokenizer
from eyas.models.head_files import HeadFiles
from eyas.models.head_loading import open_head
from eyas.workers.loading import load_draft_head
from eyas.workers.local import LocalWorkers

VERSION = 1
UNCATEGORISED = "(none)"


@dataclass(frozen=True, slots=True)
class EvaluatedHead:
    """A head, and the settings of every shape it is evaluated in."""

    name: str
    rows: list[tuple[TreeShape, EngineSettings]]


@dataclass(frozen=True, slots=True)
class Answering:
    """What the engine is asked.

    Args:
        limit: use only the first so many prompts; None for all.
        seed: prompt i is sampled with `seed + i`.
    """

    prompts_file: Path
    limit: int | None
    max_tokens: int
    temperature: float
    seed: int


def evaluate(heads: list[EvaluatedHead], answering: Answering) -> dict[str, Any]:
    """Answer the prompts with every head in every shape; the object of the module's docstring.

    Raises:
        ValueError: before anything runs, for a head, a shape or a prompt file that cannot be used.
    """
    settings = heads[0].rows[0][1]
    tokenizer = Tokenizer.from_folder(Path(settings.engine_spec().target_folder))
    prompts = read_prompts(answering.prompts_file, tokenizer)[: answering.limit]
    names = read_categories(answering.prompts_file)[: answering.limit]
    categories = [UNCATEGORISED if name is None else name for name in names]
    described = [_described(head) for head in heads]
    with progress_bar() as progress:
        for head, report in zip(heads, described, strict=True):
            for shape, row_settings in head.rows:
                task = progress.add_task(f"{head.name} {shape_name(shape)}", total=len(prompts), note="")
                on_finish = partial(progress.advance, task)
                report["shapes"].append(_evaluate_shape(shape, row_settings, prompts, categories, answering, on_finish))
    return {
        "version": VERSION,
        "machine": machine(),
        "versions": package_versions("eyas", "torch", "transformers"),
        "settings": {
            "model": settings.model,
            "dtype": settings.dtype,
            "device": settings.device,
            "temperature": answering.temperature,
            "seed": answering.seed,
            "max_tokens": answering.max_tokens,
            "batch_size": settings.max_batch_size,
            "threads": settings.threads_per_worker,
            "acceptance_prior": settings.acceptance_prior,
        },
        "prompts": {
            "file": str(answering.prompts_file),
            "sha256": hashlib.sha256(answering.prompts_file.read_bytes()).hexdigest(),
            "num_prompts": len(prompts),
        },
        "heads": described,
    }


def _described(head: EvaluatedHead) -> dict[str, Any]:
    """The head's part of the report without its shapes; loads it once, so that whatever does not fit is told first."""
    specs = [settings.engine_spec() for _, settings in head.rows]
    loaded, path = load_draft_head(specs[0]), specs[0].head_folder
    if loaded is None or path is None:
        raise ValueError(f"head: {head.name}: there is nothing to evaluate without a draft head")
    for shape, _ in head.rows:
        if shape.width > loaded.max_candidates:
            raise ValueError(
                f"shape: {shape_name(shape)}: width is {shape.width}, but {head.name} can propose only "
                f"{loaded.max_candidates} tokens"
            )
    files = open_head(Path(path))
    return {
        "name": head.name,
        "path": head.rows[0][1].head,
        "kind": files.kind,
        "format": files.format,
        "num_bytes": sum(files.tensors.num_bytes(name) for name in files.tensors.names),
        "sha256": weights_hash(files),
        "shapes": [],
    }


def weights_hash(files: HeadFiles) -> str:
    """SHA-256 over all tensors in order of their names."""
    digest = hashlib.sha256()
    for name in sorted(files.tensors.names):
        shape = files.tensors.shape(name)
        digest.update(f"{name} {list(shape)}\n".encode())
        digest.update(files.tensors.read(name, shape, torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _evaluate_shape(
    shape: TreeShape, settings: EngineSettings, prompts: list[list[int]], categories: list[str], answering: Answering,
    on_finish: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    with open_engine(settings) as (engine, tokenizer):
        if not isinstance(engine.workers, LocalWorkers):
            raise ValueError("tensor_parallel_size: drafts can only be observed in one process; use 1")
        engine.workers = observed = ObservedWorkers(engine.workers)
        stop = tokenizer.eos_token_ids
        requests = seeded_requests(prompts, answering.temperature, answering.seed, answering.max_tokens, stop)
        outputs = engine.generate(requests, on_finish)
    total, by_category = AcceptanceCounts(), dict[str, AcceptanceCounts]()
    num_prompts = Counter(categories)
    for category, output in zip(categories, outputs, strict=True):
        steps = observed.steps.get(output.request_id, [])
        for counts in (total, by_category.setdefault(category, AcceptanceCounts())):
            counts.add_text(steps, output)
    return {
        "shape": shape_name(shape),
        "num_nodes": shape.node_budget,
        "draft_depth": shape.draft_depth,
        "width": shape.width,
        "is_chain": shape.width == 1,
        **acceptance_figures(total, observed.has_prior),
        "draft_ms": median(observed.draft_ms) if observed.draft_ms else None,
        "verify_ms": median(observed.verify_ms) if observed.verify_ms else None,
        "by_category": {
            category: {
                "num_prompts": num_prompts[category],
                "num_steps": counts.num_steps,
                "num_tokens": counts.num_tokens,
                "acceptance_length": counts.acceptance_length,
            }
            for category, counts in by_category.items()
        },
    }
