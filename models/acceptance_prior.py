"""How often a head's candidates are accepted, learnt per head: what its raw scores are turned into before trees grow.

A draft tree is grown by cumulative scores (EAGLE-2, arXiv:2406.16858). The score of an edge ought to be
log P(child accepted | parent accepted); the head's own log-probability is mis-calibrated, and differently by depth and
rank. A prior holds one curve for every depth and rank, from the raw log-probability to that score, for greedy requests
and for sampled ones, whose raw score is the log-softmax of logits under the noise shared with the target.

Curves are piecewise linear between knots, do not fall, and go on below the lowest knot in parallel to the raw score.
Deeper levels use the last depth's, further ranks the last rank's: an edge never seen is scaled like the nearest one
that was, never set to a constant. Sibling order stays the head's: no candidate scores above a better-ranked sibling.

Letters: B requests, E nodes that are extended, W candidates of each, D depths, R ranks, K knots.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FIELD = "acceptance_prior"
_VERSION = 1
_REGIMES = ("greedy", "sampled")
_DIGITS = 3


class AcceptancePrior:
    """The curves of one head. It reads no device value on the host, so that it can be part of a recorded draft."""

    def __init__(self, knots: Tensor, greedy: Tensor | None, sampled: Tensor | None) -> None:
        """Args:
        knots: raw log-probabilities, increasing, the last 0, float32 `[K]`.
        greedy, sampled: scores at the knots, float32 `[D, R, K]`; None leaves that regime's raw scores as they are.

        Raises:
            ValueError: naming what is no curve.
        """
        _check_knots(knots)
        for regime, curves in zip(_REGIMES, (greedy, sampled), strict=True):
            if curves is not None:
                _check_curves(regime, curves, knots)
        if greedy is not None and sampled is not None and greedy.shape != sampled.shape:
            raise ValueError(
                f"{FIELD}.sampled: holds {_size(sampled)}, {FIELD}.greedy {_size(greedy)}; both need as many"
            )
        self.knots = knots
        self.greedy, self.sampled = greedy, sampled
        if not self.is_identity:
            self._pieces, self._firsts = self._tabulate()

    @property
    def is_identity(self) -> bool:
        """Whether it leaves every score as it is."""
        return self.greedy is None and self.sampled is None

    def to(self, device: torch.device) -> AcceptancePrior:
        """The same on another device."""
        greedy, sampled = (None if x is None else x.to(device) for x in (self.greedy, self.sampled))
        return AcceptancePrior(self.knots.to(device), greedy, sampled)

    def apply(self, log_probs: Tensor, level: int, is_sampled: Tensor) -> Tensor:
        """Scores of a level's edges, float32 `[B, E, W]`: at most 0, never NaN, not increasing along W.

        Args:
            log_probs: the head's own, best first, `[B, E, W]`; -inf and NaN are impossible and stay -inf.
            level: depth of the candidates, 1 being the root's children.
            is_sampled: which requests are drafted under noise, bool `[B]`.
        """
        if self.is_identity:
            return log_probs
        raw = torch.nan_to_num(log_probs.float(), nan=-torch.inf, posinf=0.0, neginf=-torch.inf).clamp(max=0.0)
        firsts = self._firsts_of(level, raw.shape[2]).index_select(0, is_sampled.long())[:, None]  # [B, 1, W]
        places = firsts + torch.searchsorted(self.knots, raw, right=True)
        slope, offset, low, high = self._pieces.index_select(1, places.flatten()).view(4, *raw.shape).unbind()
        scores = (offset + slope * raw).clamp(low, high)  # without the bounds, rounding could make a joint fall
        return scores.cummin(dim=2).values

    def _tabulate(self) -> tuple[Tensor, Tensor]:
        """Slope, offset, lowest and highest score of every piece of every curve, `[4, 2 * D * R * (K + 1)]`; where the
        pieces of each begin, int64 `[2, D, R]`. A regime without curves has those that change nothing."""
        knots, known = self.knots, self.greedy if self.greedy is not None else self.sampled
        assert known is not None
        raw = knots.expand_as(known)
        curves = torch.stack([raw if x is None else x for x in (self.greedy, self.sampled)]).double()
        slopes = curves.diff() / knots.double().diff()
        slopes[torch.tensor([self.greedy is None, self.sampled is None], device=knots.device)] = 1.0
        offsets = curves[..., :-1] - slopes * knots[:-1]
        below, above = (torch.full_like(curves[..., :1], value) for value in (1.0, 0.0))
        pieces = torch.stack(
            [
                torch.cat([below, slopes, above], dim=-1),
                torch.cat([curves[..., :1] - knots[:1], offsets, curves[..., -1:]], dim=-1),
                torch.cat([torch.full_like(below, -torch.inf), curves], dim=-1),
                torch.cat([curves, curves[..., -1:]], dim=-1),
            ]
        )
        num_pieces = knots.numel() + 1
        firsts = torch.arange(curves[..., 0].numel(), device=knots.device) * num_pieces
        return pieces.float().flatten(1), firsts.view(curves.shape[:-1])

    def _firsts_of(self, level: int, width: int) -> Tensor:
        """Where the pieces of a level's first `width` ranks begin, int64 `[2, W]`."""
        _, depths, ranks = self._firsts.shape
        firsts = self._firsts[:, min(level, depths) - 1, :width]
        return firsts if width <= ranks else torch.cat([firsts, firsts[:, -1:].expand(-1, width - ranks)], dim=1)

    def as_json(self) -> dict[str, Any]:
        """For a head's config: a curve is one string, since pretty-printed lists would take a line a number."""
        described: dict[str, Any] = {"version": _VERSION, "log_probs": _curve_text(self.knots)}
        for regime, curves in zip(_REGIMES, (self.greedy, self.sampled), strict=True):
            described[regime] = (
                None if curves is None else [[_curve_text(curve) for curve in depth] for depth in curves]
            )
        return described

    @staticmethod
    def of_config(config: dict[str, Any]) -> AcceptancePrior | None:
        """The prior in a head's config, on the CPU, or None if it has none.

        Raises:
            ValueError: naming the field that is wrong.
        """
        described = config.get(FIELD)
        if described is None:
            return None
        if not isinstance(described, dict):
            raise ValueError(f"{FIELD}: expected a JSON object, found {type(described).__name__}")
        if described.get("version") != _VERSION:
            raise ValueError(
                f"{FIELD}.version: is {described.get('version')!r}, only {_VERSION} is supported; "
                "run `eyas calibrate` on the head again"
            )
        unknown = sorted(set(described).difference(("version", "log_probs", *_REGIMES)))
        if unknown:
            raise ValueError(f"{FIELD}.{unknown[0]}: is no field of an acceptance prior")
        knots = _parse_curve("log_probs", described.get("log_probs"))
        greedy, sampled = (_parse_curves(regime, described.get(regime)) for regime in _REGIMES)
        return AcceptancePrior(knots, greedy, sampled)


def _size(curves: Tensor) -> str:
    return f"{curves.shape[0]} depths of {curves.shape[1]} ranks"


def _check_knots(knots: Tensor) -> None:
    if knots.dim() != 1 or knots.numel() < 2:
        raise ValueError(f"{FIELD}.log_probs: expected at least 2 numbers, found {list(knots.shape)}")
    values = knots.tolist()
    is_increasing = all(a < b for a, b in zip(values, values[1:], strict=False))
    if not is_increasing or values[-1] != 0.0 or not math.isfinite(values[0]):
        raise ValueError(f"{FIELD}.log_probs: must increase and end in 0, found {values}")


def _check_curves(regime: str, curves: Tensor, knots: Tensor) -> None:
    if curves.dim() != 3 or 0 in curves.shape or curves.shape[2] != knots.numel():
        raise ValueError(
            f"{FIELD}.{regime}: expected depths of ranks of {knots.numel()} numbers, found {list(curves.shape)}"
        )
    is_curve = curves.isfinite().all(2) & (curves <= 0).all(2) & (curves.diff(dim=2) >= 0).all(2)
    if not bool(is_curve.all()):
        depth, rank = (~is_curve).nonzero()[0].tolist()
        raise ValueError(
            f"{FIELD}.{regime}[{depth}][{rank}]: must be finite, not above 0 and not fall, found "
            f"{curves[depth, rank].tolist()}"
        )


def _curve_text(curve: Tensor) -> str:
    return " ".join(f"{round(value, _DIGITS) + 0.0:g}" for value in curve.tolist())  # + 0.0 makes -0.0 a plain 0


def _parse_curve(name: str, text: Any) -> Tensor:
    if not isinstance(text, str):
        raise ValueError(f"{FIELD}.{name}: expected numbers in a string, found {text!r}")
    try:
        return torch.tensor([float(number) for number in text.split()], dtype=torch.float32)
    except ValueError:
        raise ValueError(f"{FIELD}.{name}: expected numbers in a string, found {text!r}") from None


def _parse_curves(regime: str, depths: Any) -> Tensor | None:
    if depths is None:
        return None
    if not isinstance(depths, list) or not depths or not all(isinstance(ranks, list) and ranks for ranks in depths):
        raise ValueError(f"{FIELD}.{regime}: expected a list of depths, each a list of ranks, found {depths!r:.80}")
    curves = [
        [_parse_curve(f"{regime}[{depth}][{rank}]", text) for rank, text in enumerate(ranks)]
        for depth, ranks in enumerate(depths)
    ]
    expected = (len(curves[0]), curves[0][0].numel())
    for depth, ranks in enumerate(curves):
        for rank, curve in enumerate(ranks):
            if (len(ranks), curve.numel()) != expected:
                raise ValueError(
                    f"{FIELD}.{regime}[{depth}][{rank}]: {len(ranks)} ranks of {curve.numel()} numbers, expected "
                    f"{expected[0]} of {expected[1]} as at the first depth and rank"
                )
    return torch.stack([torch.stack(ranks) for ranks in curves])
