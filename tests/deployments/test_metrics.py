"""Metrics: names, what is counted, and timing with an injected clock."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from eyas.deployments.engine_client import EngineDownError, GenerationError, GenerationEvent, QueueFullError
from eyas.deployments.metrics import OUTCOMES, Metrics

pytestmark = pytest.mark.anyio


def sample(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


def event(num_tokens, total, finish_reason=None):
    return GenerationEvent("", tuple(range(num_tokens)), finish_reason, 1, total, total)


async def replay(*events):
    for entry in events:
        if isinstance(entry, Exception):
            raise entry
        yield entry


async def outcome_of(metrics, *events):
    """Replay a request; the one outcome it was counted under, and the exception its consumer saw."""
    before = {outcome: sample(metrics, "eyas_requests_total", outcome=outcome) for outcome in OUTCOMES}
    seen = None
    try:
        async for _ in metrics.observe_request(replay(*events), metrics.clock_s()):
            pass
    except Exception as error:
        seen = error
    after = {outcome: sample(metrics, "eyas_requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert sum(after.values()) == sum(before.values()) + 1
    return next(outcome for outcome in OUTCOMES if after[outcome] > before[outcome]), seen


async def test_names_and_their_own_registry():
    """Catches a renamed metric that dashboards read, and metrics registered globally twice in one process."""
    Metrics()
    metrics = Metrics()
    text, content_type = metrics.exposition()
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {
        "eyas_requests",
        "eyas_requests_running",
        "eyas_requests_waiting",
        "eyas_pages_free",
        "eyas_pages_total",
        "eyas_tokens_emitted",
        "eyas_verify_steps",
        "eyas_acceptance_length",
        "eyas_ttft_s",
        "eyas_tpot_s",
        "eyas_e2e_s",
        "eyas_draft_ms",
        "eyas_verify_ms",
        "eyas_other_ms",
        "eyas_batch_size",
    } <= names
    assert all(name.startswith("eyas_") for name in names)
    assert content_type.startswith("text/plain")
    assert not [family for family in REGISTRY.collect() if family.name.startswith("eyas_")]


async def test_labelled_series_exist_from_the_start():
    """Catches series that appear with their first event, whose first rise no rate() sees."""
    metrics = Metrics()
    assert [sample(metrics, "eyas_requests_total", outcome=outcome) for outcome in OUTCOMES] == [0.0] * len(OUTCOMES)
    assert sample(metrics, "eyas_pages_free", worker="drafter") == 0.0


async def test_gauges_and_steps():
    """Catches mixed-up workers, and steps without a verify counted as verify steps."""
    metrics = Metrics()
    metrics.set_load(num_running=3, num_waiting=2)
    metrics.set_pages("target", num_free=5, num_total=9)
    metrics.record_step(draft_ms=1.0, verify_ms=2.0, other_ms=0.5, batch_size=2, acceptance_lengths=[1, 3])
    metrics.record_step(draft_ms=0.0, verify_ms=2.0, other_ms=0.5, batch_size=1)
    assert sample(metrics, "eyas_requests_running") == 3
    assert sample(metrics, "eyas_requests_waiting") == 2
    assert sample(metrics, "eyas_pages_free", worker="target") == 5
    assert sample(metrics, "eyas_pages_total", worker="target") == 9
    assert sample(metrics, "eyas_pages_free", worker="drafter") == 0
    assert sample(metrics, "eyas_verify_steps_total") == 1
    assert sample(metrics, "eyas_acceptance_length_sum") == 4
    assert sample(metrics, "eyas_acceptance_length_count") == 2
    assert sample(metrics, "eyas_verify_ms_sum") == 4
    assert sample(metrics, "eyas_batch_size_sum") == 3


async def test_latencies_of_a_finished_request():
    """Catches time per token that counts the first token's wait, and an event without tokens taken for the first."""
    metrics = Metrics(clock_s=itertools.count(10.0).__next__)
    arrived_s = metrics.clock_s()
    events = replay(event(0, 0), event(1, 1), event(2, 3), event(2, 5, "stop"))
    assert len([entry async for entry in metrics.observe_request(events, arrived_s)]) == 4
    assert sample(metrics, "eyas_ttft_s_sum") == 2
    assert sample(metrics, "eyas_tpot_s_sum") == pytest.approx(2 / 4)
    assert sample(metrics, "eyas_e2e_s_sum") == 4
    assert sample(metrics, "eyas_tokens_emitted_total") == 5
    assert sample(metrics, "eyas_requests_total", outcome="stop") == 1


async def test_a_single_token_has_no_time_per_token():
    """Catches a division by zero, or a zero that pulls the mean down."""
    metrics = Metrics()
    assert await outcome_of(metrics, event(1, 1, "length")) == ("length", None)
    assert sample(metrics, "eyas_tpot_s_count") == 0
    assert sample(metrics, "eyas_e2e_s_count") == 1


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (QueueFullError("full"), "refused"),
        (EngineDownError("down"), "failed"),
        (GenerationError("nan"), "failed"),
        (RuntimeError("bug"), "failed"),
    ],
)
async def test_errors_are_counted_once_and_passed_on(failure, outcome):
    """Catches failed requests that no outcome shows, or that show as cancelled by their clients."""
    metrics = Metrics()
    assert await outcome_of(metrics, event(1, 1), failure) == (outcome, failure)
    assert sample(metrics, "eyas_e2e_s_count") == 0


async def test_events_that_just_end_are_an_error():
    """Catches a truncated answer passed off as a finished one."""
    outcome, error = await outcome_of(Metrics(), event(1, 1))
    assert outcome == "failed"
    assert isinstance(error, GenerationError)


async def test_closing_cancels_and_closes_the_engine():
    """Catches leaving the engine's generator to the garbage collector, and a cancelled request counted as failed."""
    metrics = Metrics()
    is_closed = False

    async def endless():
        nonlocal is_closed
        try:
            while True:
                yield event(1, 1)
        finally:
            is_closed = True

    observed = metrics.observe_request(endless(), metrics.clock_s())
    await anext(observed)
    await observed.aclose()
    assert is_closed
    assert sample(metrics, "eyas_requests_total", outcome="cancelled") == 1
    assert sample(metrics, "eyas_requests_total", outcome="failed") == 0
