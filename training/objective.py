"""What a training step minimises.

Letters: T rows, R bases, H hidden, V target vocabulary, Vd ids the loss is taken over, K levels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eyas.models.head import DraftHead
from eyas.training.dataset import Batch
from eyas.training.initialisation import TargetOutput
from eyas.training.losses import soft_cross_entropy, target_distribution
from eyas.training.method import TrainingMethod


class Objective(nn.Module):
    """Training loss of a head.

    Args:
        output: the target's, in the dtype to compute in.
        token_ids: what the loss is taken over, strictly increasing ids the head can propose, int64.
        num_sampled: further ids of those it can propose, drawn anew for every batch. They stand for all the others: a
            head that never saw these would not know that they are rare, and propose them far too often.
        level_decay: level i counts `level_decay ** i`.

    The head keeps float32 weights; each call computes with copies in the dtype of `output`, and gradients reach the
    float32 weights through the copies.
    """

    def __init__(
        self,
        method: TrainingMethod[Any],
        head: DraftHead,
        output: TargetOutput,
        token_ids: Tensor,
        num_levels: int,
        level_decay: float,
        num_sampled: int = 0,
    ) -> None:
        super().__init__()
        self.method = method
        self.head = head
        self.output = output
        self.num_levels = num_levels
        self.level_decay = level_decay
        self._columns = torch.searchsorted(head.candidate_ids, token_ids)
        is_other = torch.ones(head.candidate_ids.shape[0], dtype=torch.bool)
        is_other[self._columns] = False
        self._other_columns = is_other.nonzero().squeeze(1)
        self._num_sampled = num_sampled
        if num_sampled >= self._other_columns.shape[0]:
            self._columns, self._num_sampled = torch.arange(head.candidate_ids.shape[0]), 0
        is_scored = torch.zeros(output.weight.shape[0] + 1, dtype=torch.bool)
        is_scored[head.candidate_ids[self._columns]] = True
        is_scored[-1] = True  # index -1: the token after the last row is unknown
        self._is_scored = is_scored

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, a scalar, and per level the share of rows where head and target favour one token, float32 `[K]`."""
        dtype = self.output.weight.dtype
        copies = {name: weight.to(dtype) for name, weight in self.named_parameters()}
        loss, accuracy = functional_call(self, copies, (batch,))
        return loss, accuracy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`compute` in the dtype the weights have. Only answers count, and of these what the loss may hold."""
        method, hidden = self.method, self.output.norm.shape[0]
        recorded = batch.features.to(self.output.weight.dtype)
        columns, bias = self.scored_columns(batch)
        compared = batch.rows(0) + 1  # the target rows of level 0; those of level k leave out k per conversation
        with torch.no_grad():
            inputs = method.inputs(recorded, self.output)
            scored = self.output.restricted(self.head.candidate_ids[columns])
            target_probs = target_distribution(scored.logits(recorded[compared, -hidden:]) + bias)
            is_kept = self._is_scored[batch.next_ids[compared]] & batch.precedes_answer[compared]
        total, accuracies = torch.zeros(()), []
        for level, states in enumerate(method.level_states(self.head, inputs, batch, self.num_levels)):
            rows = batch.later_rows(level)
            kept = is_kept[rows].nonzero().squeeze(1)
            loss, agrees = soft_cross_entropy(
                method.projected(self.head, states.index_select(0, kept), level),
                _rows(method.projection(self.head, level), columns),
                target_probs.index_select(0, rows[kept]),
                torch.full((kept.shape[0],), 1.0 / max(1, kept.shape[0])),
                bias,
            )
            loss = method.cross_entropy_share * loss
            state_loss = method.state_loss(states, inputs.index_select(0, compared[rows]))
            if state_loss is not None:
                loss = loss + state_loss
            total = total + self.level_decay**level * loss
            accuracies.append(agrees.float().mean())
        return total, torch.stack(accuracies)

    def scored_columns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Columns of the head the loss is taken over, int64 `[Vd]`, and what is added to each one's logits.

        A sampled id counts as many times as there are others for each. The sample depends on the batch alone, so that a
        resumed run repeats it.
        """
        dtype = self.output.weight.dtype
        if not self._num_sampled:
            return self._columns, torch.zeros(self._columns.shape[0], dtype=dtype)
        generator = torch.Generator().manual_seed(int(batch.token_ids.sum()))
        num_others = self._other_columns.shape[0]
        sampled = self._other_columns[torch.randperm(num_others, generator=generator)[: self._num_sampled]]
        bias = torch.zeros(self._columns.shape[0] + self._num_sampled, dtype=dtype)
        bias[self._columns.shape[0] :] = math.log(num_others / self._num_sampled)
        return torch.cat([self._columns, sampled]), bias


def _rows(weight: Tensor, columns: Tensor) -> Tensor:
    """The rows of an output projection that are scored; all of them are not copied."""
    return weight if columns.shape[0] == weight.shape[0] else weight.index_select(0, columns)
