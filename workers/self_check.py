"""A target that runs through `transformers` must say the same with Eyas's attention as with its own, or is not served.

One short text, prefilled and then continued by a tree of two branches, against the eager forward of both branches. It
takes the place of a list of architectures that work: whatever keeps a state that does not branch, or counts positions
by itself, differs here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.kernel_set import REFERENCE_KERNELS
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.models.decoder import Decoder
from eyas.models.transformers_decoder import (
    NUM_CHECKED_TOKENS,
    NUM_SHARED_TOKENS,
    UNSERVABLE,
    TransformersDecoder,
)
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, text_attention
from eyas.workers.tree_batch import TreeBatch

# Norm of the difference over the norm of the logits. Another order of summation gives 2e-6 in float32 and 3e-2 in
# bfloat16 over 30 layers; a wrong mask, position or state gives more than 1e-1.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
_PARENTS = [-1, 0, 0, 1, 2]  # the root, then both branches side by side


def check_target(decoder: Decoder) -> None:
    """Compare with the reference the decoder was loaded with, and drop it; a native decoder has none.

    Raises:
        ValueError: naming the architecture and how far off it is.
    """
    if not isinstance(decoder, TransformersDecoder) or decoder.reference is None:
        return
    reference, decoder.reference = decoder.reference, None
    expected = torch.cat(
        [reference.logits[0, :NUM_SHARED_TOKENS]]
        + [reference.logits[:, depth] for depth in range(NUM_SHARED_TOKENS, NUM_CHECKED_TOKENS)]
    )
    try:
        with torch.inference_mode():
            found = _paged_logits(decoder, reference.token_ids)
    except UNSERVABLE as error:
        raise ValueError(
            f"architectures: {decoder.config.architecture} was refused by the self-check: {error}; use another model, "
            "see docs/targets.md"
        ) from error
    difference = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not difference <= _TOLERANCES[decoder.dtype]:
        raise ValueError(
            f"architectures: {decoder.config.architecture} was refused by the self-check: over a draft tree its logits "
            f"differ from those of transformers by {difference:.1e} of their size, at most "
            f"{_TOLERANCES[decoder.dtype]:.0e} is rounding in {str(decoder.dtype).removeprefix('torch.')}; use another "
            "model, see docs/targets.md"
        )


def _paged_logits(decoder: TransformersDecoder, token_ids: Tensor) -> Tensor:
    """Logits of the shared tokens, then of both branches' tokens level by level."""
    config, device = decoder.config, decoder.device
    prompt = token_ids[0, : NUM_SHARED_TOKENS - 1]
    tree_tokens = torch.cat([token_ids[0, NUM_SHARED_TOKENS - 1 : NUM_SHARED_TOKENS],
                             token_ids[:, NUM_SHARED_TOKENS:].T.reshape(-1)])  # fmt: skip
    num_prompt, num_slots = prompt.numel(), prompt.numel() + tree_tokens.numel()
    pool = KVPool(
        PoolLayout(num_slots, 1), config.num_layers, config.num_kv_heads, config.head_dim, decoder.dtype, device,
        config.value_head_dim,
    )  # fmt: skip
    slots = torch.arange(num_slots, device=device).flip(0)
    positions = torch.arange(num_prompt, device=device)
    first = decoder(prompt, positions, text_attention(pool, config.num_heads, slots[:num_prompt])).hidden

    backend = ReferenceAttention(pool.geometry(config.num_heads))
    batch = TreeBatch.build(
        [(tree_tokens.tolist(), _PARENTS)], [num_prompt], backend.mask_encoding, device, REFERENCE_KERNELS
    )
    attend = backend.plan(batch.paged_rows(slots[None].to(torch.int32), has_windows=True))
    attention = PagedAttention(pool, slots[num_prompt:], [AttentionGroup(tree_tokens.numel(), attend)])
    second = decoder(tree_tokens, batch.layout.positions[0], attention).hidden
    return torch.cat([decoder.logits(first), decoder.logits(second)])
