"""Losslessness on the real model: the same texts with trees, without, in other shapes, over ranks, and in transformers.

    python benchmarks/lossless.py [--prompts FILE] [--limit 40] [--max-tokens 64] [--tp 3] [--skip-transformers]

Float32. Prints one row per comparison and exits 1 if any text differs. Greedy runs are also compared with
`transformers` generate; sampled runs (temperature 1, seed i for prompt i) with each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from eyas.deployments.local_engine import open_engine
from eyas.deployments.offline import OfflineRequest
from eyas.deployments.progress import progress_bar
from eyas.deployments.prompts import read_prompts
from eyas.deployments.settings import EngineSettings
from eyas.models.catalog import DEFAULT_TARGET, resolve_target
from eyas.workers.sampling import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DEFAULT_SHAPE = {"node_budget": 8, "draft_depth": 3, "width": 4}
OTHER_SHAPES = [{"node_budget": 16, "draft_depth": 5, "width": 4}, {"node_budget": 6, "draft_depth": 5, "width": 1}]


def texts(args: argparse.Namespace, temperature: float, **settings: object) -> tuple[list[list[int]], float]:
    """Token ids of every answer, and the mean acceptance length."""
    fields = {"dtype": "float32", "threads_per_worker": args.threads, "max_batch_size": args.batch, **settings}
    with open_engine(EngineSettings.model_validate(fields)) as (engine, tokenizer):
        prompts = read_prompts(args.prompts, tokenizer)[: args.limit]
        requests = [
            OfflineRequest(prompt, SamplingParams(temperature, 1.0, index), args.max_tokens, tokenizer.eos_token_ids)
            for index, prompt in enumerate(prompts)
        ]
        outputs = engine.generate(requests)
    steps = sum(output.num_steps for output in outputs)
    return [output.token_ids for output in outputs], sum(output.num_step_tokens for output in outputs) / steps


def transformers_texts(args: argparse.Namespace) -> list[list[int]]:
    """The same prompts through `transformers` generate, one by one, greedy, float32."""
    from transformers import AutoModelForCausalLM

    from eyas.deployments.tokenizer import Tokenizer

    folder = resolve_target(DEFAULT_TARGET)
    tokenizer = Tokenizer.from_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.set_num_threads(args.threads)
    answers = []
    prompts = read_prompts(args.prompts, tokenizer)[: args.limit]
    with progress_bar() as progress, torch.inference_mode():
        task = progress.add_task("transformers", total=len(prompts), note="")
        for prompt in prompts:
            ids = torch.tensor([prompt])
            # The mask is given: transformers would take end-of-turn tokens within the prompt for padding.
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.max_tokens, do_sample=False
            )
            answers.append(output[0, len(prompt) :].tolist())
            progress.advance(task)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tp", type=int, default=None, help="also run over so many target ranks")
    parser.add_argument("--skip-transformers", action="store_true")
    args = parser.parse_args()

    table = Table(title=f"{args.limit} prompts x {args.max_tokens} tokens, float32, batch {args.batch}")
    for column in ("temperature", "compared with plain decoding", "equal", "acceptance length", "s"):
        table.add_column(column)
    all_equal = True
    for temperature in (0.0, 1.0):
        plain, _ = texts(args, temperature, speculate=False)
        runs: list[tuple[str, dict[str, object]]] = [
            (f"{shape['node_budget']} nodes, depth {shape['draft_depth']}, width {shape['width']}", dict(shape))
            for shape in [DEFAULT_SHAPE, *OTHER_SHAPES]
        ]
        if args.tp is not None:
            ranks = {"tensor_parallel_size": args.tp, "threads_per_worker": 1}
            runs.append((f"default tree, {args.tp} ranks", {**DEFAULT_SHAPE, **ranks}))
        if temperature == 0.0 and not args.skip_transformers:
            runs.append(("transformers generate", {}))
        for name, settings in runs:
            start = time.perf_counter()
            other, length = texts(args, temperature, **settings) if settings else (transformers_texts(args), 1.0)
            equal = sum(a == b for a, b in zip(plain, other, strict=True))
            all_equal &= equal == len(plain)
            elapsed_s = time.perf_counter() - start
            table.add_row(f"{temperature}", name, f"{equal}/{len(plain)}", f"{length:.2f}", f"{elapsed_s:.0f}")
    Console().print(table)
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
