"""FlashInfer's kernels beside attention, under the signatures of `kernels.fused` and `kernels.sample`.

They stand here to be measured: no setting selects one until it has won on a GPU, see docs/backends.md. What is missing
cannot win under those signatures. `fused_add_rmsnorm` overwrites both its inputs, while a head may still have to read
the residual; its RoPE wants a table of float32 and leaves the writes of keys and values to further launches; its
samplers draw noise of their own, which would make the text depend on the batch.

Letters: T tokens, H hidden, Hq heads, D head dim, I MLP width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.fused.add_rms_norm`; `x` is `[T, H]` or `[T, Hq, D]`, in a half type."""
    import flashinfer

    residual = x if update is None else x + update
    return flashinfer.rmsnorm(residual, weight, eps), residual


def silu_gate(gate_up: Tensor) -> Tensor:
    """See `kernels.fused.silu_gate`; `[T, 2 I]` in a half type."""
    import flashinfer

    return flashinfer.silu_and_mul(gate_up)  # type: ignore[no-any-return]


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """See `kernels.sample.nucleus`, without its sort of the vocabulary.

    Sums are exact integers, so that a row's nucleus does not depend on its batch. A token whose probability is 0 in
    float32 lies outside of every nucleus.
    """
    import flashinfer

    narrows = top_p < 1.0
    inner = torch.where(narrows, top_p, 0.5)  # the library asks for less than 1; these rows are not used
    kept = flashinfer.sampling.top_p_renorm_probs(logits.softmax(dim=-1), inner, is_deterministic=True)
    return logits.masked_fill((kept == 0.0) & narrows[:, None], -torch.inf)
