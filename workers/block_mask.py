"""What the rows of a block see of it, in the encoding that an attention backend reads.

Letters: B requests, N rows, K places of the block, L places of prefix and block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.build import MaskEncoding, packed_mask


def encode_block_mask(visible: Tensor, prefix_lengths: Tensor, encoding: MaskEncoding, max_prefix: int) -> Tensor:
    """`visible`, bool `[B, N, K]`, in `encoding`; every row sees its whole prefix `[B]`.

    Args:
        max_prefix: bound of the prefixes; only FULL has columns for them, L = max_prefix + K.
    """
    if encoding is MaskEncoding.TREE_ONLY:
        return visible
    if encoding is MaskEncoding.PACKED:
        return packed_mask(visible)
    num_places = visible.shape[2]
    columns = torch.arange(max_prefix + num_places, device=visible.device) - prefix_lengths[:, None]  # [B, L]
    in_block = (columns >= 0) & (columns < num_places)
    seen = visible.gather(2, columns.clamp(0, num_places - 1)[:, None].expand(-1, visible.shape[1], -1))
    return (columns < 0)[:, None] | (in_block[:, None] & seen)
