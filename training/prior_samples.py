"""What an acceptance prior is fitted from: a head's candidates along texts of the corpus, and what the target chose.

A head is run over texts as in its training-time test, so that along a text it drafts from its own states; no engine is
needed, and whatever can draft can be measured. From base t, level k (0 is the root's children) is compared with the
target's choice at row t + 1 + k. It counts only where the drafter would have got there: the text's tokens before it
are the target's own choices, and were among the head's candidates.

Letters: N bases, R rows, D levels, W candidates, V target vocabulary, H target hidden, F features of a position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.noise import keyed_noise, stream_keys
from eyas.kernels.sample import perturb
from eyas.models.head import Candidates, DraftHead
from eyas.training.batch import Batch
from eyas.training.initialisation import TargetOutput
from eyas.training.ttt import training_time_test

_BLOCK_ROWS = 256  # scores of the target's whole vocabulary are made for so many rows at once


@dataclass(frozen=True, slots=True)
class PathSamples:
    """A regime's observations.

    Args:
        log_probs: of the candidates along the text, best first, float32 `[N, D, W]`; -inf past the text's end.
        accepted: rank of the candidate that the target chose, -1 if none, int64 `[N, D]`.
        is_counted: whether a drafter gets to this level, bool `[N, D]`.
        conversations: which text each base is of, int64 `[N]`.
    """

    log_probs: Tensor
    accepted: Tensor
    is_counted: Tensor
    conversations: Tensor

    def of(self, chosen: Tensor) -> PathSamples:
        """The bases where `chosen [N]` is true."""
        return PathSamples(
            self.log_probs[chosen], self.accepted[chosen], self.is_counted[chosen], self.conversations[chosen]
        )

    @staticmethod
    def joined(parts: list[PathSamples]) -> PathSamples:
        """Several batches' as one."""
        return PathSamples(
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.accepted for part in parts]),
            torch.cat([part.is_counted for part in parts]),
            torch.cat([part.conversations for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class FeatureReader:
    """Picks what a head reads out of the states that a corpus holds.

    Args:
        aux_layers: residual-stream indices of the fused layers in the corpus; the last state before the final norm
            follows them.
        final_index: see `DecoderConfig.final_index`; the index of the state before the norm is one less.
    """

    aux_layers: tuple[int, ...]
    final_index: int
    output: TargetOutput

    def read(self, head: DraftHead, features: Tensor) -> Tensor:
        """`[T, F]` of the recorded `[T, (A + 1) * H]`, in the type and on the device of `output`, which are the head's.

        Raises:
            ValueError: for a head that reads a state the corpus does not hold.
        """
        features = features.to(self.output.weight)
        return torch.cat([self._state(features, index) for index in head.capture], dim=1)

    def _state(self, features: Tensor, index: int) -> Tensor:
        hidden = self.output.norm.shape[0]
        if index == self.final_index:
            return self.output.normed(features[:, -hidden:])
        recorded = (*self.aux_layers, self.final_index - 1)
        if index not in recorded:
            raise ValueError(
                f"corpus: holds the target's states {list(recorded)}, but the head reads {index}; record a corpus with "
                "the layers that this head reads"
            )
        place = recorded.index(index)
        return features[:, place * hidden : (place + 1) * hidden]


@dataclass(frozen=True, slots=True)
class _Ranker:
    """`models.head.Ranker` as a drafter's: plain, or under each row's noise at temperature 1."""

    width: int
    positions: Tensor | None = None
    seed: int = 0

    def rank(self, logits: Tensor, token_ids: Tensor) -> Candidates:
        scores = self._scores(logits, token_ids)
        best, columns = scores.topk(min(self.width, scores.shape[1]), dim=-1)
        tokens = token_ids[columns] if token_ids.dim() == 1 else token_ids.gather(1, columns)
        return Candidates(tokens, best - scores.logsumexp(dim=-1, keepdim=True))

    def shortlist(self, logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
        return self._scores(logits, token_ids).topk(count, dim=-1).indices

    def _scores(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        if self.positions is None:
            return logits.float()
        ones = torch.ones_like(self.positions, dtype=torch.float32)
        return perturb(logits, ones, torch.full_like(self.positions, self.seed), self.positions, token_ids)


@dataclass(slots=True)
class SampleCollector:
    """Runs a head over batches.

    Args:
        depth: D.
        width: W.
        seed: of the noise.
    """

    head: DraftHead
    reader: FeatureReader
    depth: int
    width: int
    seed: int
    _num_rows: int = field(default=0, init=False)
    _num_texts: int = field(default=0, init=False)

    @torch.no_grad()
    def collect(self, batches: Iterable[Batch]) -> tuple[PathSamples, PathSamples]:
        """All batches' observations, greedy and sampled, on the CPU."""
        pairs = [self._collect(batch.to(self._device)) for batch in batches]
        return PathSamples.joined([greedy for greedy, _ in pairs]), PathSamples.joined([noisy for _, noisy in pairs])

    def _collect(self, batch: Batch) -> tuple[PathSamples, PathSamples]:
        compared = batch.rows(0) + 1
        keys = self._num_rows + compared  # each row's noise is its own
        level_states = self._level_states(batch)
        greedy, noisy = self._choices(batch, compared, keys)
        samples = self._observed(batch, level_states, greedy, None), self._observed(batch, level_states, noisy, keys)
        self._num_rows += batch.token_ids.shape[0]
        self._num_texts += len(batch.lengths)
        return samples

    @property
    def _device(self) -> torch.device:
        return self.reader.output.weight.device

    def _observed(self, batch: Batch, level_states: list[Tensor], choices: Tensor, keys: Tensor | None) -> PathSamples:
        """One regime's observations; `choices` are the target's tokens and `keys` the noise at each base's first row,
        int64 `[N]`."""
        device = self._device
        compared = batch.rows(0) + 1
        emitted = batch.next_ids[compared]
        is_answer = batch.precedes_answer[compared]
        num_bases, width = compared.shape[0], min(self.width, self.head.max_candidates)
        log_probs = torch.full((num_bases, self.depth, width), -torch.inf, device=device)
        accepted = torch.full((num_bases, self.depth), -1, device=device)
        is_counted = torch.zeros(num_bases, self.depth, dtype=torch.bool, device=device)
        is_open = torch.ones(num_bases, dtype=torch.bool, device=device)
        for level, states in enumerate(level_states):
            rows = batch.later_rows(level)  # of the bases that have this level, where it is compared
            bases = self._bases(batch, level).to(device)
            ranked = self._ranked(states, level, None if keys is None else keys[rows])
            is_chosen = ranked.tokens == choices[rows, None]
            log_probs[bases, level] = ranked.log_probs
            accepted[bases, level] = torch.where(is_chosen.any(1), is_chosen.int().argmax(1), -1)
            reached = torch.zeros_like(is_open)
            reached[bases] = is_open[bases] & is_answer[rows]
            is_counted[:, level] = reached
            follows = is_chosen.any(1) & (choices[rows] == emitted[rows])
            is_open = torch.zeros_like(is_open).index_put((bases,), reached[bases] & follows)
        texts = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.num_bases(0)))
        return PathSamples(log_probs.cpu(), accepted.cpu(), is_counted.cpu(), texts + self._num_texts)

    @staticmethod
    def _bases(batch: Batch, level: int) -> Tensor:
        """Where the bases that have a level stand among all, int64 `[R]`."""
        pieces, offset = [], 0
        for total, count in zip(batch.num_bases(0), batch.num_bases(level), strict=True):
            pieces.append(torch.arange(offset, offset + count))
            offset += total
        return torch.cat(pieces)

    def _level_states(self, batch: Batch) -> list[Tensor]:
        """The head's states at every base of every level, `[R, S]` each."""
        inputs = self.reader.read(self.head, batch.features)
        if self.head.is_path_dependent:
            return training_time_test(self.head, inputs, batch, self.depth)
        return [inputs[batch.rows(level)] for level in range(self.depth)]

    def _ranked(self, states: Tensor, level: int, keys: Tensor | None) -> Candidates:
        levels = range(level + 1, level + 2)
        parts = []
        for first in range(0, max(1, states.shape[0]), _BLOCK_ROWS):
            rows = slice(first, first + _BLOCK_ROWS)
            ranker = _Ranker(self.width) if keys is None else _Ranker(self.width, keys[rows], self.seed)
            parts.append(self.head.candidates(states[rows], levels, ranker))
        return Candidates(torch.cat([x.tokens for x in parts]), torch.cat([x.log_probs for x in parts]))

    def _choices(self, batch: Batch, compared: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The target's token after each compared row, greedy and under noise, int64 `[N]` each."""
        output = self.reader.output
        states = batch.features[compared, -output.norm.shape[0] :]
        token_ids = torch.arange(output.weight.shape[0], device=self._device)
        greedy, noisy = [], []
        for rows, row_keys in zip(states.split(_BLOCK_ROWS), keys.split(_BLOCK_ROWS), strict=True):
            logits = output.logits(rows.to(output.weight)).float()
            greedy.append(logits.argmax(dim=-1))
            noise = keyed_noise(stream_keys(torch.full_like(row_keys, self.seed), row_keys), token_ids)
            noisy.append(logits.add_(noise).argmax(dim=-1))
        return torch.cat(greedy), torch.cat(noisy)
