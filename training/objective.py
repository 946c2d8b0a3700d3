"""What a training step minimises and a validation pass counts, both over a training-time test.

Letters: T rows, R bases, A fused layers, H hidden, Vd draft vocabulary, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eyas.models.eagle3 import Eagle3Head
from eyas.training.dataset import Batch
from eyas.training.initialisation import TargetOutput
from eyas.training.losses import soft_cross_entropy, target_distribution
from eyas.training.ttt import training_time_test

_RECALL_RANKS = 4


class Objective(nn.Module):
    """Training loss of a head.

    Args:
        output: the target's, restricted to the draft vocabulary, in the dtype to compute in.
        step_decay: step i counts `step_decay ** i`.

    The head keeps float32 weights; each call computes with copies in the dtype of `output`, and gradients reach the
    float32 weights through the copies.
    """

    def __init__(self, head: Eagle3Head, output: TargetOutput, num_steps: int, step_decay: float) -> None:
        super().__init__()
        self.head = head
        self.output = output
        self.num_steps = num_steps
        self.step_decay = step_decay
        in_draft = torch.zeros(head.embedding.shape[0] + 1, dtype=torch.bool)
        in_draft[head.candidate_ids] = True
        in_draft[-1] = True  # index -1: the token after the last row is unknown
        self._in_draft = in_draft

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, a scalar, and per step the share of rows where head and target favour the same token, float32 `[K]`."""
        dtype = self.output.weight.dtype
        copies = {name: weight.to(dtype) for name, weight in self.named_parameters()}
        loss, accuracy = functional_call(self, copies, (batch,))
        return loss, accuracy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`compute` in the dtype the weights have. Rows that emitted an id outside the draft vocabulary are dropped."""
        hidden = self.output.weight.shape[1]
        features = batch.features.to(self.output.weight.dtype)
        compared = batch.rows(0) + 1  # the target rows of step 0; those of step k leave out k per conversation
        with torch.no_grad():
            target_probs = target_distribution(self.output.logits(features[compared, -hidden:]))
            is_kept = self._in_draft[batch.next_ids[compared]]
        steps = training_time_test(self.head, features[:, :-hidden], batch, self.num_steps)
        total, accuracies = torch.zeros(()), []
        for step, states in enumerate(steps):
            rows = later_rows(batch, step)
            kept = is_kept[rows].nonzero().squeeze(1)
            loss, agrees = soft_cross_entropy(
                self.head.norm(states.index_select(0, kept)),
                self.head.output.weight,
                target_probs.index_select(0, rows[kept]),
                torch.full((kept.shape[0],), 1.0 / max(1, kept.shape[0])),
            )
            total = total + self.step_decay**step * loss
            accuracies.append(agrees.float().mean())
        return total, torch.stack(accuracies)


def later_rows(batch: Batch, step: int) -> Tensor:
    """Where the target rows of `step` stand among those of step 0, int64 `[R_step]`."""
    pieces, offset = [], 0
    for first_count, count in zip(batch.num_bases(0), batch.num_bases(step), strict=True):
        pieces.append(torch.arange(offset + first_count - count, offset + first_count))
        offset += first_count
    return torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class Validation:
    """Agreement with the target's own favourite over its whole vocabulary, on texts the head was not trained on.

    Args:
        recall: `[K][4]`: per step, the share of rows whose favourite is among the head's first 1, 2, 3, 4 candidates.
        chain_length: mean tokens per verify step of a K-token chain on these texts, bonus token included.
    """

    recall: list[list[float]]
    chain_length: float

    @property
    def accuracy(self) -> list[float]:
        """Per step, how often the head's first candidate is the favourite."""
        return [ranks[0] for ranks in self.recall]


@torch.no_grad()
def validate(head: Eagle3Head, output: TargetOutput, batches: list[Batch], num_steps: int) -> Validation:
    """Measure a head in the dtype its weights have; `output` spans the target's whole vocabulary."""
    dtype, hidden = head.fc.weight.dtype, output.weight.shape[1]
    hits = torch.zeros(num_steps, _RECALL_RANKS)
    totals = torch.zeros(num_steps)
    num_accepted, num_chains = 0, 0
    for batch in batches:
        features = batch.features.to(dtype)
        compared = batch.rows(0) + 1
        favourites = output.logits(batch.features[compared, -hidden:].to(output.weight.dtype)).argmax(dim=-1)
        emitted = batch.next_ids[compared]
        emitted = torch.where(emitted < 0, favourites, emitted)
        is_open = torch.ones(compared.shape[0], dtype=torch.bool)
        for step, states in enumerate(training_time_test(head, features[:, :-hidden], batch, num_steps)):
            rows = later_rows(batch, step)
            ranked = head.candidate_ids[head.logits(states).topk(_RECALL_RANKS, dim=-1).indices]
            hits[step] += (ranked == favourites[rows, None]).float().cumsum(dim=1).sum(dim=0)
            totals[step] += rows.shape[0]
            if step:
                kept = is_open.split(batch.num_bases(step - 1))
                is_open = torch.cat([x[:n] for x, n in zip(kept, batch.num_bases(step), strict=True)])
            is_open = is_open & (ranked[:, 0] == emitted[rows])
            num_accepted += int(is_open.sum())
        num_chains += compared.shape[0]
    return Validation((hits / totals.clamp(min=1)[:, None]).tolist(), 1 + num_accepted / max(1, num_chains))
