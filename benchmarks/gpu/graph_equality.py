"""Step: texts written from recorded graphs, and the same texts step by step without graphs; they must be equal.

Batches grow, shrink and fall between the recorded sizes, some requests sample, and prompts arrive between replays. The
eager engine runs its steps as `--eager` does. Float32, where no rounding between two batch sizes is large enough to
change a choice.
"""

from __future__ import annotations

import torch
from device_backends import backends_called
from engine import Engine, TreeShape
from outcome import Context, Outcome
from random_models import SMOLLM2_135M, TINY, ModelShape, random_head, random_target

from eyas.models.eagle3 import Eagle3Head
from eyas.models.llama import LlamaDecoder
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.graphs import recorder_for
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.target import TargetRunner

PAGE_SIZE = 16
MAX_LENGTH = 128
PROMPT_LENGTH = 20
SHAPE = TreeShape(num_nodes=8, draft_depth=3, width=4)
MAX_BATCH = 4
# Requests that are admitted, requests that are dropped, then so many steps of all that live.
PHASES: tuple[tuple[list[int], list[int], int], ...] = (
    ([0], [], 3),
    ([1, 2], [], 3),
    ([3], [0], 2),
    ([], [1, 2], 2),
    ([4, 5, 6], [], 3),
)


def run(context: Context) -> Outcome:
    outcome = Outcome(
        settings={"dtype": "torch.float32", "tree": f"{SHAPE.num_nodes} nodes, depth {SHAPE.draft_depth}, "
                  f"width {SHAPE.width}", "batches_up_to": MAX_BATCH, "temperature": 0.8}
    )  # fmt: skip
    # Triton through its interpreter takes seconds a step.
    names = ("reference",) if context.dry_run else ("triton",)
    for shape in (TINY,) if context.dry_run else (TINY, SMOLLM2_135M):
        target = random_target(shape, torch.float32, context.device)
        head = random_head(shape, target)
        for name in names:
            outcome.rows.append(_compare(shape, target, head, name, outcome))
    if context.dry_run:
        outcome.omitted.append("CUDA graphs: what is recorded is run again instead of replayed")
        outcome.omitted.append(f"{SMOLLM2_135M.name} shapes: too slow here")
    return outcome


def _compare(
    shape: ModelShape, target: LlamaDecoder, head: Eagle3Head, name: str, outcome: Outcome
) -> dict[str, object]:
    eager, recorded = (_engine(target, head, name) for _ in range(2))
    limits = GraphLimits(MAX_BATCH, SHAPE.num_nodes, SHAPE.draft_depth, MAX_LENGTH // PAGE_SIZE, SHAPE.width)
    recorded.target.record_graphs(limits, recorder_for(target.device))
    assert recorded.drafter is not None
    recorded.drafter.record_graphs(limits, recorder_for(target.device))
    num_steps, num_tokens, num_equal = 0, 0, 0
    for admitted, dropped, steps in PHASES:
        for engine in (eager, recorded):
            engine.finish(dropped)
            engine.admit(admitted, PROMPT_LENGTH, MAX_LENGTH, temperature=0.8)
        for _ in range(steps):
            expected, found = eager.step(SHAPE), recorded.step(SHAPE)
            num_steps += 1
            num_tokens += sum(len(run.tokens) for run in expected)
            num_equal += expected == found
            if expected != found:
                outcome.failures.append(f"{shape.name}, {name}, step {num_steps}: {found} from graphs, not {expected}")
    return {
        "case": f"{shape.name}, {name}",
        "steps": num_steps,
        "tokens": num_tokens,
        "equal_steps": num_equal,
    }


def _engine(target: LlamaDecoder, head: Eagle3Head, name: str) -> Engine:
    layout = PoolLayout(sum(len(admitted) for admitted, *_ in PHASES) * MAX_LENGTH // PAGE_SIZE, PAGE_SIZE)
    backends = backends_called(name)
    runner = TargetRunner(target, layout, head.capture, backends)
    return Engine(runner, DraftRunner(head, layout, backends=backends), layout)
