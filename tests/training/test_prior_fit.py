from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.config import DecoderConfig
from eyas.training import prior_fit
from eyas.training.dataset import Corpus
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.methods import KINDS, training_method
from eyas.training.prior_fit import KNOTS, STRENGTH, fit_curves, fit_prior, fit_regime, judge
from eyas.training.prior_samples import FeatureReader, PathSamples
from eyas.training.training_config import TrainingConfig

NUM_TEXTS = 40


def drawn(
    num_bases: int, depth: int = 1, width: int = 3, power: float = 1.0, confidence: float = 1.0, spread: float = 2.0
) -> PathSamples:
    """Bases whose candidate of probability p is accepted with p ** power, and which the head sees as surer of
    themselves than they are by `confidence`."""
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(num_bases, depth, width + 3, generator=generator)).sort(2, descending=True).values
    log_probs = (confidence * logits).log_softmax(2)[..., :width]
    shares = (logits.log_softmax(2)[..., :width] * power).exp()
    shares = torch.cat([shares, (1 - shares.sum(2, keepdim=True)).clamp(min=0)], dim=2)
    accepted = torch.multinomial(shares.flatten(0, 1), 1, generator=generator).view(num_bases, depth)
    accepted = torch.where(accepted < width, accepted, -1)
    is_reached = torch.cat([torch.ones(num_bases, 1, dtype=torch.bool), (accepted[:, :-1] >= 0).cumprod(1).bool()], 1)
    texts = torch.arange(num_bases) * NUM_TEXTS // num_bases
    return PathSamples(log_probs, accepted, is_reached, texts)


@st.composite
def few_samples(draw: st.DrawFn) -> PathSamples:
    count = draw(st.integers(0, 6))
    numbers = st.sampled_from([0.0, -1e-4, -0.3, -2.0, -4.605, -9.0, -30.0, -1e4, -math.inf])
    rows = [sorted(draw(st.lists(numbers, min_size=2, max_size=2)), reverse=True) for _ in range(count)]
    accepted = [draw(st.integers(-1, 1)) for _ in range(count)]
    counted = [draw(st.booleans()) for _ in range(count)]
    return PathSamples(
        torch.tensor(rows).view(count, 1, 2),
        torch.tensor(accepted, dtype=torch.int64).view(count, 1),
        torch.tensor(counted, dtype=torch.bool).view(count, 1),
        torch.arange(count),
    )


@given(few_samples())
def test_thin_knots_stay_near_the_raw_score(samples: PathSamples) -> None:
    """Catches a neutral prior, one lucky candidate that outweighs it, and curves that `AcceptancePrior` refuses."""
    curves = fit_curves(samples, KNOTS)
    assert curves.shape == (1, 2, len(KNOTS))
    AcceptancePrior(torch.tensor(KNOTS), curves, None)
    most = int(samples.is_counted.sum())
    assert float((curves - torch.tensor(KNOTS)).abs().max()) <= math.log(1 + most / STRENGTH) + 1e-5


def test_without_samples_curves_are_the_raw_scores() -> None:
    """Catches any pull away from raw where nothing was seen, at any depth."""
    curves = fit_curves(drawn(0, depth=2), KNOTS)
    torch.testing.assert_close(curves, torch.tensor(KNOTS).expand(2, 3, -1), atol=1e-6, rtol=0)


def test_candidates_below_the_lowest_knot_say_nothing_about_it() -> None:
    """Catches hopeless candidates counted as misses of one that is a thousand times likelier."""
    count = 5000
    hopeless = PathSamples(
        torch.full((count, 1, 1), -30.0), torch.full((count, 1), -1), torch.ones(count, 1).bool(), torch.arange(count)
    )
    assert float(fit_curves(hopeless, KNOTS)[0, 0, 0]) == pytest.approx(KNOTS[0], abs=1e-5)


def test_a_depth_without_samples_is_like_the_one_above() -> None:
    """Catches deep levels that fall back to raw scores while shallow ones are pulled down."""
    samples = drawn(4000, depth=2, power=2.0)
    is_shallow = torch.tensor([True, False])
    curves = fit_curves(
        PathSamples(samples.log_probs, samples.accepted, samples.is_counted & is_shallow, samples.conversations), KNOTS
    )
    torch.testing.assert_close(curves[1], curves[0], atol=1e-5, rtol=0)
    assert float(curves[0, 0, -5]) < KNOTS[-5] - 0.3


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_a_known_calibration_is_recovered(power: float) -> None:
    """Catches samples counted at the wrong knot, rank or depth, and hits of another candidate."""
    samples = drawn(60_000, depth=2, power=power, spread=1.5)
    curves = fit_curves(samples, KNOTS)
    for rank, probabilities in enumerate(((0.5, 0.65), (0.25, 0.15), (0.15, 0.1))):
        for probability in probabilities:
            knot = min(range(len(KNOTS)), key=lambda index: abs(KNOTS[index] - math.log(probability)))
            for depth in range(2):
                # Lines between knots lie above a power; the knots beside this one are further away.
                assert float(curves[depth, rank, knot]) == pytest.approx(power * KNOTS[knot], abs=0.18 * power)


def test_judgement_by_hand() -> None:
    """Catches losses of candidates that no drafter gets to, and means taken over the wrong number."""
    samples = PathSamples(
        torch.tensor([[[0.8, 0.1]], [[0.5, 0.5]], [[0.6, 0.3]]]).log(),
        torch.tensor([[0], [-1], [1]]),
        torch.tensor([[True], [False], [True]]),
        torch.tensor([0, 0, 2]),
    )
    found = judge(samples, lambda log_probs, level: log_probs)
    losses = [-math.log(0.8) - math.log(0.9), 0.0, -math.log(0.4) - math.log(0.3)]
    assert found.losses.tolist() == pytest.approx(losses, abs=1e-6)
    assert found.is_judged.tolist() == [True, False, True]
    assert found.num_samples == 4
    assert found.log_loss == pytest.approx(sum(losses) / 4, abs=1e-6)
    assert found.calibration_error == pytest.approx((0.2 + 0.1 + 0.6 + 0.7) / 4, abs=1e-6)


@pytest.mark.parametrize(("confidence", "is_kept"), [(1.0, False), (2.5, True), (0.5, True)])
@pytest.mark.parametrize("regime", ["greedy", "sampled"])
def test_only_better_curves_are_kept(regime: Any, confidence: float, is_kept: bool) -> None:
    """Catches chance taken for gain, gain refused, and one regime's curves judged as the other's."""
    table, report = fit_regime(drawn(6000, depth=3, width=4, confidence=confidence), regime)
    assert report.is_kept == is_kept
    assert (table is not None) == is_kept
    (before, after), (error_before, error_after) = report.log_loss, report.calibration_error
    assert (after < before - 0.01) == is_kept
    assert (error_after < error_before - 0.01) == is_kept
    gains = [longer - shorter for shorter, longer in report.lengths.values()]
    assert list(report.lengths) == [f"{nodes}x{width}" for width in (4, 8) for nodes in (4, 8, 16, 32)]
    if is_kept:
        assert sum(gains) > 0.0


@pytest.mark.parametrize(("confidence", "step", "is_kept"), [(1.0, 0.1, False), (2.5, -0.1, False), (2.5, 0.1, True)])
def test_both_loss_and_length_must_get_better(
    confidence: float, step: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a regime kept for longer paths alone, which may be chance, or for a lower loss that shortens them."""
    lengths = iter([2.0, 2.0 + step] * 2)
    monkeypatch.setattr(prior_fit, "expected_lengths", lambda *_: [next(lengths)] * 4)
    _, report = fit_regime(drawn(6000, depth=3, width=4, confidence=confidence), "greedy")
    assert report.is_kept == is_kept


def test_a_kept_regime_is_fitted_on_all_texts() -> None:
    """Catches half of the texts thrown away once they have judged."""
    samples = drawn(6000, depth=3, width=4, confidence=2.5)
    table, _ = fit_regime(samples, "greedy")
    assert table is not None
    assert torch.equal(table, fit_curves(samples, KNOTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head_is_fitted(
    kind: str, dtype: torch.dtype, target_folder: Path, target: DecoderConfig, corpus: Corpus
) -> None:
    """Catches a kind whose states, levels or candidates cannot be run over a corpus as a trainer does, with a copy of
    the trained head in another type, and a report that JSON cannot hold."""
    config, output = TrainingConfig(kind, num_steps=1), TargetOutput.load(target_folder, target, dtype)
    aux_layers = (2, 3, 5)
    weights = NewWeights(target_folder, target, dtype, seed=0)
    trained = training_method(config, aux_layers).new_head(weights, torch.arange(0, 64, 2), 3)
    head = copy.deepcopy(trained).to(dtype)
    reader = FeatureReader(aux_layers, target.final_index, output)
    batches = [corpus.batch(corpus.conversations[:3]), corpus.batch(corpus.conversations[3:])]
    fit = fit_prior(head, reader, batches, depth=5, width=4)
    report = json.loads(json.dumps({"greedy": asdict(fit.greedy), "sampled": asdict(fit.sampled)}))
    assert report["greedy"]["num_samples"] > 0
    assert report["sampled"]["log_loss"] != report["greedy"]["log_loss"]
    assert fit_prior(head, reader, batches, depth=5, width=4).sampled == fit.sampled  # the noise has a seed
    num_rows = sum(sum(batch.lengths) for batch in batches)
    half = fit_prior(head, reader, batches, depth=5, width=4, max_rows=num_rows - 1)
    assert half.greedy == fit_prior(head, reader, batches[:1], depth=5, width=4).greedy != fit.greedy


def test_what_cannot_be_fitted_is_refused(target_folder: Path, target: DecoderConfig, corpus: Corpus) -> None:
    """Catches a split of one conversation, and a head that a training-time test cannot run."""
    output = TargetOutput.load(target_folder, target, torch.float32)
    weights = NewWeights(target_folder, target, torch.float32, seed=0)
    head = training_method(TrainingConfig("eagle3", num_steps=1), (2, 3, 5)).new_head(weights, torch.arange(64), 3)
    reader = FeatureReader((2, 3, 5), target.final_index, output)
    with pytest.raises(ValueError, match="corpus: an acceptance prior needs at least two conversations"):
        fit_prior(head, reader, [corpus.batch(corpus.conversations[:1])])
    head.cache = type(head.cache)(2, 4, 2, 8, 8)
    with pytest.raises(ValueError, match="head: has 2 layers; only heads of one"):
        fit_prior(head, reader, [corpus.batch(corpus.conversations)])


@settings(max_examples=20)
@given(few_samples(), st.integers(0, 3))
def test_any_few_samples_can_be_judged(samples: PathSamples, shift: int) -> None:
    """Catches a division by none, and a regime kept for luck."""
    shifted = PathSamples(
        samples.log_probs, samples.accepted, samples.is_counted, samples.conversations + torch.tensor(shift)
    )
    table, report = fit_regime(shifted, "greedy")
    values: list[float] = [*report.log_loss, *report.calibration_error]
    assert all(math.isfinite(value) for value in values)
    assert isinstance(table, Tensor | None)
