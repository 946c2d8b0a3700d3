"""Fitting a head's acceptance prior to texts it was not trained on, and judging whether it is worth having.

Every (depth, rank, knot) is a Beta-binomial estimate: a sample counts at the two knots around its raw score, as linear
interpolation would weigh them. The estimate before any sample is, at depth 1, the raw probability p itself, and below
that the curve of the depth above, worth `strength` accepted candidates (that many in strength / p seen): n samples of
one knot can move it by at most log(1 + n / strength). Then the curve is made to rise.

Half of the conversations fit, the others judge: a regime is left raw unless its curves lower the log-loss there by
more than two standard errors and its trees' paths get longer. One that is kept is fitted again on all of them.

Letters: N bases, D levels, W candidates, K knots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.acceptance_prior import FIELD, AcceptancePrior
from eyas.models.head import DraftHead
from eyas.training.batch import Batch
from eyas.training.isotonic import rising
from eyas.training.prior_samples import FeatureReader, PathSamples, SampleCollector
from eyas.training.tree_outcome import Score, expected_lengths

_KNOT_PROBABILITIES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0)
KNOTS = tuple(round(math.log(probability), 3) for probability in _KNOT_PROBABILITIES)
STRENGTH = 16.0
BUDGETS = (4, 8, 16, 32)
WIDTHS = (4, 8)
_NUM_BINS = 15
_NUM_ERRORS = 2.0  # standard errors of the mean over conversations; a smaller gain may be chance
_SMALLEST = 1e-6  # a miss at probability 1 would make the log-loss infinite
_NOISE_SEED = 20_408


@dataclass(frozen=True, slots=True)
class RegimeReport:
    """What calibration does to one regime on the half of the texts that did not fit it.

    Args:
        is_kept: False if the regime is left raw, because it got no better.
        num_samples: candidates that were judged.
        log_loss: mean of a candidate, before and after, nats.
        calibration_error: expected difference of score and share of accepted candidates, before and after.
        lengths: `"8x4"`, a tree's nodes and width, to the tokens per verify step expected before and after.
    """

    is_kept: bool
    num_samples: int
    log_loss: tuple[float, float]
    calibration_error: tuple[float, float]
    lengths: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class PriorFit:
    """A fitted prior, and what it is worth."""

    prior: AcceptancePrior
    greedy: RegimeReport
    sampled: RegimeReport


def fit_prior(
    head: DraftHead,
    reader: FeatureReader,
    batches: Sequence[Batch],
    depth: int = 5,
    width: int = max(WIDTHS),
    max_rows: int = 30_000,
) -> PriorFit:
    """Fit a head's prior.

    Args:
        head: in the type it will be served in; needs no training method, only what every head has.
        batches: conversations it was not trained on, with the target's states, at least two of them.
        depth: deepest level with curves of its own.
        width: ranks with curves of their own.
        max_rows: of a larger corpus, evenly spread batches with about so many rows are used.

    Raises:
        ValueError: if there are fewer than two conversations, if the corpus lacks a state that the head reads, or for a
            head that a training-time test cannot run.
    """
    if sum(len(batch.lengths) for batch in batches) < 2:
        raise ValueError("corpus: an acceptance prior needs at least two conversations, one to fit and one to judge")
    if head.cache is not None and head.cache.num_layers > 1:
        raise ValueError(f"head: has {head.cache.num_layers} layers; only heads of one can be run over a corpus")
    depth = depth if head.max_depth is None else min(depth, head.max_depth)
    stride = -(-sum(sum(batch.lengths) for batch in batches) // max_rows)
    plain, noisy = SampleCollector(head, reader, depth, width, _NOISE_SEED).collect(batches[::stride])
    (greedy, greedy_report), (sampled, sampled_report) = fit_regime(plain, "greedy"), fit_regime(noisy, "sampled")
    prior = AcceptancePrior(torch.tensor(KNOTS), greedy, sampled)
    stored = AcceptancePrior.of_config({FIELD: prior.as_json()})  # with the digits that a file keeps
    assert stored is not None
    return PriorFit(stored, greedy_report, sampled_report)


def fit_regime(samples: PathSamples, regime: Literal["greedy", "sampled"]) -> tuple[Tensor | None, RegimeReport]:
    """A regime's curves `[D, W, K]`, or None if they are no better than raw scores, and the judgement."""
    is_judge = samples.conversations % 2 == 1
    judges, curves = samples.of(is_judge), fit_curves(samples.of(~is_judge), KNOTS)
    before, after = judge(judges, _raw), judge(judges, _scores_by(curves, regime))
    lengths: dict[str, tuple[float, float]] = {}
    for width in WIDTHS:
        shape = (list(BUDGETS), width, samples.accepted.shape[1])
        both = (expected_lengths(judges, score, *shape) for score in (_raw, _scores_by(curves, regime)))
        lengths |= {f"{n}x{width}": (a, b) for n, a, b in zip(BUDGETS, *both, strict=True)}
    gain = (before.losses - after.losses)[before.is_judged]
    is_better = gain.numel() > 1 and bool(gain.mean() > _NUM_ERRORS * gain.std() / gain.numel() ** 0.5)
    is_longer = sum(longer - shorter for shorter, longer in lengths.values()) > 0
    is_kept = is_better and is_longer
    report = RegimeReport(
        is_kept,
        before.num_samples,
        (before.log_loss, after.log_loss),
        (before.calibration_error, after.calibration_error),
        lengths,
    )
    return (fit_curves(samples, KNOTS) if is_kept else None), report


def fit_curves(samples: PathSamples, knots: Iterable[float], strength: float = STRENGTH) -> Tensor:
    """Scores at the knots for every depth and rank, float32 `[D, W, K]`; without samples the knots themselves."""
    places = torch.tensor(list(knots), dtype=torch.float64)
    _, depth, width = samples.log_probs.shape
    before = places.exp().expand(width, -1)
    curves = []
    for level in range(depth):
        counted = samples.is_counted[:, level]
        is_hit = samples.accepted[counted, level, None] == torch.arange(width)
        seen, hits = _counts(samples.log_probs[counted, level].double(), is_hit, places)
        weights = seen + strength / before
        means = (hits + strength) / weights
        before = torch.tensor(
            [rising(row, weight) for row, weight in zip(means.tolist(), weights.tolist(), strict=True)],
            dtype=torch.float64,
        )
        curves.append(before.log())
    return torch.stack(curves).float().clamp(max=0.0)


def _counts(log_probs: Tensor, is_hit: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Samples, and hits among them, of each rank at each knot: `[N, W]` each to `[W, K]` each."""
    width, last = log_probs.shape[1], knots.numel() - 1
    above = torch.searchsorted(knots, log_probs.contiguous(), right=True).clamp(1, last)
    share = (log_probs.clamp(min=float(knots[0])) - knots[above - 1]) / (knots[above] - knots[above - 1])
    is_known = (log_probs >= knots[0]).double()
    seen, hits = (torch.zeros(width, knots.numel(), dtype=torch.float64) for _ in range(2))
    rows = torch.arange(width).expand_as(above)
    for place, weight in ((above - 1, 1 - share), (above, share)):
        weight = weight.clamp(0.0, 1.0) * is_known
        seen.index_put_((rows, place), weight, accumulate=True)
        hits.index_put_((rows, place), weight * is_hit, accumulate=True)
    return seen, hits


@dataclass(frozen=True, slots=True)
class Judgement:
    """How well scores foretell what is accepted.

    Args:
        log_loss: mean of a candidate, nats.
        losses: sum of each conversation's, float64.
        is_judged: which conversations have any candidate, bool.
    """

    num_samples: int
    log_loss: float
    calibration_error: float
    losses: Tensor
    is_judged: Tensor


def judge(samples: PathSamples, score: Score) -> Judgement:
    """Judge scores by every candidate that a drafter gets to."""
    predicted, observed, texts = [], [], []
    for level in range(samples.accepted.shape[1]):
        counted = samples.is_counted[:, level]
        raw = samples.log_probs[counted, level]
        predicted.append(score(raw[:, None], level + 1).exp().flatten())
        observed.append((samples.accepted[counted, level, None] == torch.arange(raw.shape[1])).flatten())
        texts.append(samples.conversations[counted].repeat_interleave(raw.shape[1]))
    shares, hits, owners = torch.cat(predicted).double(), torch.cat(observed).double(), torch.cat(texts)
    loss = F.binary_cross_entropy(shares.clamp(_SMALLEST, 1 - _SMALLEST), hits, reduction="none")
    num_texts = 1 + int(samples.conversations.max()) if samples.conversations.numel() else 0
    losses, counts = (torch.zeros(num_texts, dtype=torch.float64) for _ in range(2))
    losses.index_add_(0, owners, loss)
    counts.index_add_(0, owners, torch.ones_like(loss))
    bins = (shares * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    gaps = torch.zeros(_NUM_BINS, dtype=torch.float64).index_add_(0, bins, shares - hits)
    total = max(1, loss.numel())
    return Judgement(loss.numel(), float(loss.sum()) / total, float(gaps.abs().sum()) / total, losses, counts > 0)


def _raw(log_probs: Tensor, level: int) -> Tensor:
    return log_probs


def _scores_by(curves: Tensor, regime: Literal["greedy", "sampled"]) -> Score:
    """Scores by one regime's curves."""
    is_sampled = regime == "sampled"
    knots = torch.tensor(KNOTS)
    prior = AcceptancePrior(knots, None, curves) if is_sampled else AcceptancePrior(knots, curves, None)

    def score(log_probs: Tensor, level: int) -> Tensor:
        return prior.apply(log_probs, level, torch.full((log_probs.shape[0],), is_sampled))

    return score
