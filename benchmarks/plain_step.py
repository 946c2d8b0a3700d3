"""One plain decoding step: Eyas without speculation against an eager `transformers` step, in one run.

    python benchmarks/plain_step.py [--dtype bfloat16] [--tokens 64] [--repeats 3]

Both decode the same greedy continuation of the same prompt at batch 1; repeats alternate; medians over all steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eyas.deployments.local_engine import open_engine
from eyas.deployments.machine import machine
from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.prompts import read_prompts
from eyas.deployments.settings import EngineSettings
from eyas.models.catalog import DEFAULT_TARGET, resolve_target
from eyas.workers.sampling import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@torch.inference_mode()
def transformers_steps_ms(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[float]:
    """Wall time of each decoding step with the library's own cache."""
    output = model(torch.tensor([prompt]), use_cache=True)
    times = []
    for _ in range(num_tokens - 1):
        start = time.perf_counter()
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def eyas_step_ms(engine: OfflineEngine, prompt: list[int], num_tokens: int) -> float:
    """Mean wall time of a decoding step, scheduling included."""
    steps, total = engine.times.num_steps, engine.times.total_ms
    engine.generate([OfflineRequest(prompt, SamplingParams(), num_tokens)])
    return (engine.times.total_ms - total) / (engine.times.num_steps - steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    settings = EngineSettings(dtype=args.dtype, speculate=False, max_batch_size=1, threads_per_worker=args.threads)
    model = AutoModelForCausalLM.from_pretrained(resolve_target(DEFAULT_TARGET), dtype=getattr(torch, args.dtype))
    theirs: list[float] = []
    ours: list[float] = []
    with open_engine(settings) as (engine, tokenizer):
        prompt = read_prompts(PROMPTS, tokenizer)[0]
        for repeat in range(args.repeats + 1):
            their_steps = transformers_steps_ms(model, prompt, args.tokens)
            our_step = eyas_step_ms(engine, prompt, args.tokens)
            if repeat:  # the first round warms both up
                theirs += their_steps
                ours.append(our_step)
    print(machine())
    print(f"{args.dtype}, {args.threads} threads, {args.tokens} tokens, {args.repeats} repeats")
    print(f"transformers, eager: {statistics.median(theirs):.2f} ms a step (median)")
    print(f"eyas, no speculation: {statistics.median(ours):.2f} ms a step (median of means)")


if __name__ == "__main__":
    main()
