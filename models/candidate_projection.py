"""A low-rank stand-in for a head's output projection that finds the candidates; the full rows then score them exactly.

The output projection is most of what a draft step reads. Two factors of rank r give approximate scores of the whole
vocabulary, the best m columns are kept, and only their m rows of the full projection are read. The layout is that of
EAGLE-4 exports (`LlamaForCausalLMEagle4`), as their public documentation describes it.

Letters: T rows, H hidden, r rank, V target vocabulary, Vd scored vocabulary, m candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.models.head import Candidates, Ranker
from eyas.models.head_files import HeadOptions
from eyas.models.linear import Linear
from eyas.models.tensor_source import TensorSource, read_tensors

DOWN, UP = "efficient_lm_head_down_proj.weight", "efficient_lm_head.weight"
CANDIDATE_TENSORS = (DOWN, UP)
DEFAULT_CANDIDATES = 128


class RowLinear(Linear):
    """A linear layer whose weight keeps the plain layout, since single rows of it are read."""

    def pack(self) -> None:
        """Do nothing: a packed weight has no rows."""


class CandidateProjection(nn.Module):
    """The two factors.

    Args:
        down: `[r, H]`.
        up: `[Vd, r]`, one row for each scored token.
        num_candidates: m; as many as there are tokens makes it the full projection.
    """

    def __init__(self, down: Tensor, up: Tensor, num_candidates: int) -> None:
        super().__init__()
        self.down = Linear(down)
        self.up = Linear(up)
        self.num_candidates = min(num_candidates, up.shape[0])

    def rank(self, states: Tensor, output: Linear, token_ids: Tensor, scale: float, ranker: Ranker) -> Candidates:
        """The best of `token_ids [Vd]` after each state `[T, H]`; `output [Vd, H]` is the full projection."""
        if self.num_candidates == token_ids.numel():
            return ranker.rank(output(states) * scale, token_ids)
        approximate = self.up(self.down(states)) * scale
        columns = ranker.shortlist(approximate, token_ids, self.num_candidates)  # [T, m]
        exact = (output.weight[columns] @ states[:, :, None]).squeeze(2)
        return ranker.rank(exact * scale, token_ids[columns])

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The factors under their published names."""
        return {DOWN: self.down.weight, UP: self.up.weight}


def weights_read(num_rows: int, hidden_size: int, rank: int, num_candidates: int, num_states: int) -> int:
    """Weights that scoring `num_states` at once reads: both factors, and for each state its own m rows of Vd."""
    return rank * (hidden_size + num_rows) + min(num_rows, num_states * num_candidates) * hidden_size


def read_candidate_projection(
    source: TensorSource,
    config: dict[str, Any],
    options: HeadOptions,
    token_ids: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> CandidateProjection | None:
    """The factors in a head's files, or None if they hold none.

    Args:
        config: whose `num_candidates`, Eyas's own field, says m unless the options do.
        token_ids: target ids of the rows the head scores, int64 `[Vd]`.
        shape: V and H.

    Raises:
        ValueError: naming the option that needs the factors, or the tensor that is missing or misshapen.
    """
    found = [name for name in CANDIDATE_TENSORS if name in source.names]
    if not found:
        if options.num_candidates is not None:
            raise ValueError(f"num_candidates: {source.origin} holds no low-rank candidate projection to apply it to")
        return None
    wanted = config.get("num_candidates") if options.num_candidates is None else options.num_candidates
    num_candidates = DEFAULT_CANDIDATES if wanted is None else int(wanted)
    if num_candidates < 1:
        raise ValueError(f"num_candidates: must be at least 1, got {num_candidates}")
    vocab_size, hidden_size = shape
    rank = source.shape(found[0])[0 if found[0] == DOWN else -1]
    rows = source.shape(UP)[0] if UP in found else vocab_size
    if rows not in (token_ids.numel(), vocab_size):
        raise ValueError(f"{source.origin}: tensor {UP} has {rows} rows, expected {token_ids.numel()} or {vocab_size}")
    tensors = read_tensors(source, {DOWN: (rank, hidden_size), UP: (rows, rank)}, dtype)
    up = tensors[UP] if rows == token_ids.numel() else tensors[UP][token_ids]
    return CandidateProjection(tensors[DOWN], up, num_candidates)
