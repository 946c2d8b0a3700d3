"""What a training step minimises.

Letters: T rows, R bases, H hidden, V target vocabulary, Vd ids the loss is taken over, K levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eyas.models.head import DraftHead
from eyas.training.batch import Batch
from eyas.training.feature_noise import with_noise
from eyas.training.initialisation import TargetOutput
from eyas.training.losses import hard_cross_entropy, soft_cross_entropy, target_distribution
from eyas.training.method import TrainingMethod
from eyas.training.objective_options import DISTILL, ObjectiveOptions
from eyas.training.rounding import rounded_up
from eyas.training.tree_loss import tree_cross_entropy

_PROJECTION = "head.output.weight"
_ROW_STEP = 128


@dataclass(frozen=True, slots=True)
class _Truth:
    """What the rows of level 0 are compared with: target probabilities `[R, Vd]` and columns `[R]`, -1 if unscored."""

    probs: Tensor | None
    favourites: Tensor

    def take(self, rows: Tensor) -> _Truth:
        probs = None if self.probs is None else self.probs.index_select(0, rows)
        return _Truth(probs, self.favourites.index_select(0, rows))


class Objective(nn.Module):
    """Training loss of a head. Head and output must lie where they are to be used: what is made here lies there, too.

    Args:
        output: the target's, in the dtype to compute in.
        token_ids: what the loss is always taken over, strictly increasing ids the head can propose, int64.
        num_sampled: further ids of those it can propose, drawn anew for every batch. They stand for all that neither
            are among these nor occur in the batch: a head that never saw these would not know that they are rare, and
            propose them far too often.
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
        options: ObjectiveOptions = DISTILL,
    ) -> None:
        super().__init__()
        self.method = method
        self.head = head
        self.output = output
        self.num_levels = num_levels
        self.level_decay = level_decay
        self.options = options
        device, num_candidates = head.candidate_ids.device, head.candidate_ids.shape[0]
        self._is_other = torch.ones(num_candidates, dtype=torch.bool, device=device)
        self._is_other[torch.searchsorted(head.candidate_ids, token_ids.to(device))] = False
        self._num_sampled = num_sampled
        if num_sampled >= int(self._is_other.sum()):
            self._is_other[:] = False
        self._columns = (~self._is_other).nonzero().squeeze(1)
        self.num_kept = 0  # rows the loss of the last batch was taken over, at its first level

    def compute(self, batch: Batch, step: int = 0) -> tuple[Tensor, Tensor]:
        """Loss, a scalar, and per level the share of rows whose favourite is the head's first candidate, float32 `[K]`.

        The favourite is the target's; with the hard objective, the token of the text. Noise depends on `step` and the
        batch, so that a resumed run repeats it and ranks draw their own.
        """
        dtype = self.output.weight.dtype
        copies = {name: weight if name == _PROJECTION else weight.to(dtype) for name, weight in self.named_parameters()}
        loss, accuracy = functional_call(self, copies, (batch, step))
        return loss, accuracy

    def forward(self, batch: Batch, step: int = 0) -> tuple[Tensor, Tensor]:
        """`compute` in the dtype the weights have, but for the projection, of which few rows may be scored. Only rows
        that the loss can hold count."""
        method, options = self.method, self.options
        if options.loss_rows == "all":
            batch = whole_texts(batch)
        recorded = batch.features.to(self.output.weight.dtype)
        columns, bias = self.scored_columns(batch)
        # Index -1, the unknown token after the last row, finds -1, as does every id that the head cannot propose.
        column_of = torch.full((self.output.weight.shape[0] + 1,), -1, device=columns.device)
        column_of[self.head.candidate_ids[columns]] = torch.arange(columns.shape[0], device=columns.device)
        compared = batch.rows(0) + 1  # the target rows of level 0; those of level k leave out k per conversation
        with torch.no_grad():
            inputs = method.inputs(recorded, self.output)
            read = self._with_noise(inputs, batch, step)
            emitted = batch.next_ids[compared]
            truth, is_kept = self._truth(recorded[compared], column_of[emitted], emitted, columns, bias)
            is_foretold = batch.precedes_answer[compared]
            is_kept &= is_foretold
        total, accuracies = torch.zeros((), device=inputs.device), []
        weights: dict[Tensor, Tensor] = {}  # levels mostly share one projection, whose rows are then taken once
        for level, states in enumerate(method.level_states(self.head, read, batch, self.num_levels)):
            rows = batch.later_rows(level)
            kept = is_kept[rows].nonzero().squeeze(1)
            if level == 0:
                self.num_kept = kept.shape[0]
            projection = method.projection(self.head, level)
            if projection not in weights:
                weights[projection] = _rows(projection, columns).to(recorded.dtype)
            scored = _filled(kept)
            projected = method.projected(self.head, states.index_select(0, scored), level)
            compared_with = truth.take(rows[scored])
            loss, agrees = self._token_loss(projected, weights[projection], compared_with, bias, kept.shape[0])
            loss = method.cross_entropy_share * loss
            foretold = is_foretold[rows].nonzero().squeeze(1)
            if foretold.shape[0]:
                following = inputs.index_select(0, compared[rows[foretold]])
                state_loss = method.state_loss(states.index_select(0, foretold), following)
                loss = loss if state_loss is None else loss + state_loss
            total = total + self.level_decay**level * loss
            accuracies.append(agrees[: kept.shape[0]].float().sum() / max(1, kept.shape[0]))
        return total, torch.stack(accuracies)

    def _with_noise(self, inputs: Tensor, batch: Batch, step: int) -> Tensor:
        if not self.options.feature_noise:
            return inputs
        key = self.options.seed, step, int(batch.token_ids.sum())
        return with_noise(inputs, self.output.norm.shape[0], self.options.feature_noise, *key)

    def _truth(
        self, recorded: Tensor, tokens: Tensor, emitted: Tensor, columns: Tensor, bias: Tensor
    ) -> tuple[_Truth, Tensor]:
        """Of the rows of level 0, and which of them can be in the loss, bool `[R]`.

        Args:
            recorded: the target's states `[R, (A + 1) * H]`.
            tokens, emitted: column and id of the token after each, int64 `[R]`; -1 for none.
        """
        if self.options.name == "hard":
            return _Truth(None, tokens), tokens >= 0
        scored = self.output.restricted(self.head.candidate_ids[columns])
        logits = scored.logits(recorded[:, -self.output.norm.shape[0] :])
        return _Truth(target_distribution(logits + bias), logits.max(dim=-1).indices), (tokens >= 0) | (emitted < 0)

    def _token_loss(
        self, states: Tensor, weight: Tensor, truth: _Truth, bias: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Mean loss of the first `num_rows` rows, and where the favourite is the first candidate."""
        row_weights = torch.zeros(states.shape[0], device=states.device)
        row_weights[:num_rows] = 1.0 / max(1, num_rows)
        if truth.probs is None:
            return hard_cross_entropy(states, weight, truth.favourites, row_weights, bias)
        if self.options.name == "tree":
            width, share = self.options.tree_width, self.options.tree_share
            return tree_cross_entropy(states, weight, truth.probs, row_weights, truth.favourites, width, share, bias)
        return soft_cross_entropy(states, weight, truth.probs, row_weights, bias, truth.favourites)

    def scored_columns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Columns of the head the loss is taken over, int64 `[Vd]`, and what is added to each one's logits.

        A sampled id counts as many times as there are others for each. The sample depends on the batch alone, so that a
        resumed run repeats it.
        """
        dtype, device = self.output.weight.dtype, self._columns.device
        present = self._columns_of(batch.next_ids)
        always = torch.cat([self._columns, present[self._is_other[present]]])
        is_left = self._is_other.clone()
        is_left[present] = False
        left = is_left.nonzero().squeeze(1)
        # Up to an eighth more, so that the loss mostly has as many columns as in other batches.
        in_all = rounded_up(always.shape[0] + self._num_sampled, max(1, self._num_sampled // 8))
        num_sampled = min(in_all - always.shape[0], left.shape[0])
        bias = torch.zeros(always.shape[0] + num_sampled, dtype=dtype, device=device)
        if not num_sampled:
            return always, bias
        generator = torch.Generator("cpu").manual_seed(int(batch.token_ids.sum()))
        drawn = torch.randperm(left.shape[0], generator=generator, device="cpu")[:num_sampled]
        bias[always.shape[0] :] = math.log(left.shape[0] / num_sampled)
        return torch.cat([always, left[drawn.to(device)]]), bias

    def _columns_of(self, token_ids: Tensor) -> Tensor:
        """Columns of the ids that the head can propose, each once, int64."""
        candidates = self.head.candidate_ids
        distinct = token_ids.unique()
        places = torch.searchsorted(candidates, distinct).clamp(max=candidates.shape[0] - 1)
        return places[candidates[places] == distinct]


def whole_texts(batch: Batch) -> Batch:
    """The same conversations as if the target had written every token."""
    return replace(batch, is_answer=torch.ones_like(batch.is_answer), prompt_lengths=[0] * len(batch.lengths))


def _filled(rows: Tensor) -> Tensor:
    """Row numbers, the first one repeated until there are a multiple of `_ROW_STEP`."""
    missing = rounded_up(rows.shape[0], _ROW_STEP) - rows.shape[0]
    return torch.cat([rows, rows[:1].expand(missing)]) if rows.shape[0] else rows


def _rows(weight: Tensor, columns: Tensor) -> Tensor:
    """The rows of an output projection that are scored; all of them are not copied."""
    return weight if columns.shape[0] == weight.shape[0] else weight.index_select(0, columns)
