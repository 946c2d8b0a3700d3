"""Step: the work between matrix products and the choice of tokens, each backend's way of it.

Sizes are those of one layer of the model, and its vocabulary. `kernels_ms` adds up the kernels of one call, without
launches; the floor is the time to read each input and write each output once at the measured copy bandwidth.

Letters: T rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from outcome import Context, Outcome
from random_models import LLAMA_3_8B, TINY, ModelShape
from timing import busy_ms, copy_bandwidth
from torch import Tensor

from eyas.kernels import flashinfer_ops, sample
from eyas.kernels.kernel_set import load_kernels

ROWS = (8, 512)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, by backend.

    Args:
        num_bytes: of its inputs and outputs.
    """

    name: str
    num_bytes: int
    calls: dict[str, Callable[[], object]]


def run(context: Context) -> Outcome:
    """Eyas's own; FlashInfer's come in a step of their own, after the one that compiles them."""
    return measure(context, ["reference", "triton"])


def measure(context: Context, backends: list[str]) -> Outcome:
    """Every operation by those of these backends that have it."""
    shape, counts = (TINY, (2,)) if context.dry_run else (LLAMA_3_8B, ROWS)
    bandwidth = copy_bandwidth(1 << (24 if context.dry_run else 32), context.device)
    outcome = Outcome(settings={"model": shape.name, "dtype": str(context.dtype), "copy_gb_per_s": bandwidth / 1e9})
    for num_rows in counts:
        for operation in _operations(num_rows, shape, context):
            for backend in backends:
                if backend not in operation.calls:
                    continue
                outcome.rows.append(
                    {
                        "case": f"{operation.name}, {num_rows} rows",
                        "backend": backend,
                        "kernels_ms": busy_ms(operation.calls[backend], context.device),
                        "floor_ms": operation.num_bytes / bandwidth * 1e3,
                    }
                )
    return outcome


def _operations(num_rows: int, shape: ModelShape, context: Context) -> list[Operation]:
    config, device, dtype = shape.target_config, context.device, context.dtype

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    kernels = {name: load_kernels(name) for name in ("reference", "triton")}
    x, update, weight = (
        random(num_rows, config.hidden_size),
        random(num_rows, config.hidden_size),
        random(config.hidden_size),
    )
    gate_up = random(num_rows, 2 * config.intermediate_size)
    heads = config.num_heads + 2 * config.num_kv_heads
    qkv = random(num_rows, heads, config.head_dim)
    rotation = (random(num_rows, 1, config.head_dim), random(num_rows, 1, config.head_dim))
    keys, values = (random(4 * num_rows, config.num_kv_heads, config.head_dim) for _ in range(2))
    slots = torch.randperm(4 * num_rows, device=device)[:num_rows]
    logits = random(num_rows, config.vocab_size)
    temperatures = torch.ones(num_rows, device=device)
    seeds, positions = (torch.arange(num_rows, device=device) for _ in range(2))
    wide_logits, top_p = logits.float(), torch.full((num_rows,), 0.9, device=device)

    def of(call: Callable[[str], object]) -> dict[str, Callable[[], object]]:
        return {name: partial(call, name) for name in kernels}

    return [
        Operation(
            "norm with residual",
            4 * x.nbytes,
            of(lambda name: kernels[name].fused.add_rms_norm(x, update, weight, 1e-5))
            | {"flashinfer": lambda: flashinfer_ops.add_rms_norm(x, update, weight, 1e-5)},
        ),
        Operation(
            "SiLU gate",
            gate_up.nbytes * 3 // 2,
            of(lambda name: kernels[name].fused.silu_gate(gate_up))
            | {"flashinfer": lambda: flashinfer_ops.silu_gate(gate_up)},
        ),
        Operation(
            "rotation and KV write",
            2 * qkv.nbytes,
            of(lambda name: kernels[name].fused.rotate_and_store(qkv, rotation, slots, keys, values, config.num_heads)),
        ),
        Operation(
            "noise and argmax",
            logits.nbytes,
            of(lambda name: kernels[name].sample_tokens(logits, temperatures, seeds, positions)),
        ),
        Operation(
            "nucleus",
            2 * wide_logits.nbytes,
            {
                "reference": lambda: sample.nucleus(wide_logits, top_p),
                "flashinfer": lambda: flashinfer_ops.nucleus(wide_logits, top_p),
            },
        ),
    ]
