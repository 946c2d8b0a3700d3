"""Whether recorded steps fit into the memory that weights and KV pages have left.

All recordings of a process share one pool, and the largest is made first, so that its bytes are those of all. What
dominates them is the vocabulary: per row, the logits as the model gives them and, for a nucleus, float32 scores, their
sorted copy with its int64 order, the sort's own copies, the running mass, and the narrowed logits.

Letters: T rows of the largest step, V vocabulary, H hidden, I MLP width.
"""

from __future__ import annotations

import torch

from eyas.models.config import DecoderConfig

_NUCLEUS_BYTES = 5 * 4 + 26  # per score; the sort keeps keys, order, and a copy of both
_HIDDEN_COPIES = 8  # residual, update, norm, queries, keys, values, attended, captured


def step_bytes(config: DecoderConfig, num_rows: int, dtype: torch.dtype, tensor_parallel_size: int) -> int:
    """Bytes that a decode step of `num_rows` nodes allocates at most, on one rank."""
    scores = config.vocab_size * (2 * dtype.itemsize + _NUCLEUS_BYTES)
    inner = 3 * int(config.raw.get("intermediate_size") or 4 * config.hidden_size) // tensor_parallel_size
    return num_rows * (scores + dtype.itemsize * (_HIDDEN_COPIES * config.hidden_size + inner))


def check_step_memory(needed_bytes: int, device: torch.device) -> None:
    """Refuse recordings that cannot fit.

    Raises:
        ValueError: naming the settings and both sizes.
    """
    if device.type != "cuda":
        return
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if needed_bytes > free_bytes:
        raise ValueError(
            f"max_batch_size: recording the largest decode step takes about {needed_bytes >> 20} MiB, but weights and "
            f"KV pages leave {free_bytes >> 20} MiB; lower max_batch_size, node_budget or gpu_memory_fraction"
        )
