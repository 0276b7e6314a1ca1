"""Shares of a window: against brute force, by hand, and as metrics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.telemetry.metrics import MetricsError
from vla3_plugin.telemetry.timeline import DROPPED_LANE, Span
from vla3_plugin.telemetry.utilisation import (
    Shares,
    carry_over,
    distribution,
    flatten,
    lane_shares,
    shares,
    shares_by_kind,
    staleness_metrics,
    utilisation_metrics,
)

NAMES = ("chunk_step", "reset", "wait:batch", "wait:data")
# Whole-number bounds, so that the middles of unit cells are never on one and brute force is exact.
span_lists = st.lists(
    st.tuples(st.integers(-5, 45), st.integers(0, 30), st.sampled_from(NAMES)).map(
        lambda t: Span("env0", "shard 0", t[2], float(t[0]), float(t[0] + t[1]))
    ),
    max_size=25,
)
windows = st.tuples(st.integers(0, 40), st.integers(1, 30)).map(lambda t: (float(t[0]), float(t[0] + t[1])))


def cells(window: tuple[float, float]) -> np.ndarray:
    return np.arange(window[0], window[1]) + 0.5


@given(span_lists, windows)
@settings(max_examples=300, deadline=None)
def test_busy_equals_the_sampled_union_of_work(spans, window):
    work = [s for s in spans if not s.waits]
    covered = sum(any(s.start < x < s.end for s in work) for x in cells(window))
    assert shares(flatten(work, *window), window[1] - window[0]).busy == pytest.approx(covered / len(cells(window)))


@given(span_lists, windows)
@settings(max_examples=300, deadline=None)
def test_every_instant_belongs_to_the_innermost_span(spans, window):
    expected = {"busy": 0, "free": 0} | {n: 0 for n in NAMES}
    for x in cells(window):
        covering = [s for s in spans if s.start < x < s.end]
        if not covering:
            expected["free"] += 1
            continue
        begun_last = max(s.start for s in covering)
        end = min(s.end for s in covering if s.start == begun_last)
        names = {s.name for s in covering if (s.start, s.end) == (begun_last, end)}
        if len(names) > 1:
            return  # two spans of equal begin and end: either may stand for both
        name = names.pop()
        expected[name if name.startswith("wait:") else "busy"] += 1
    found = shares(flatten(spans, *window), window[1] - window[0])
    n = len(cells(window))
    assert found.busy == pytest.approx(expected["busy"] / n)
    assert found.unaccounted == pytest.approx(expected["free"] / n, abs=1e-12)
    for cause in ("wait:batch", "wait:data"):
        assert found.waits.get(cause, 0.0) == pytest.approx(expected[cause] / n)


@given(span_lists, windows)
@settings(max_examples=200, deadline=None)
def test_segments_are_in_order_inside_the_window_and_never_overlap(spans, window):
    segments = flatten(spans, *window)
    bounds = [b for s in segments for b in (s.start, s.end)]
    assert bounds == sorted(bounds) and all(s.end > s.start for s in segments)
    assert not bounds or (bounds[0] >= window[0] and bounds[-1] <= window[1])
    assert all(s.span.start <= s.start and s.end <= s.span.end for s in segments)


@given(span_lists, st.permutations(range(25)))
@settings(max_examples=100, deadline=None)
def test_the_order_in_which_processes_are_drained_does_not_matter(spans, order):
    shuffled = [spans[i] for i in order if i < len(spans)]
    a, b = (shares(flatten(s, 0.0, 50.0), 50.0) for s in (spans, shuffled))
    assert a.busy + sum(a.waits.values()) == pytest.approx(b.busy + sum(b.waits.values()))


def span(name: str, start: float, end: float, role: str = "policy0", lane: str = "inference") -> Span:
    return Span(role, lane, name, start, end)


def test_spans_are_clipped_to_the_window():
    spans = [span("batch", 0, 3), span("wait:env", 3, 20)]
    (item,) = lane_shares(spans, 2.0, 12.0).values()
    assert item.busy == pytest.approx(0.1) and item.waits == {"wait:env": pytest.approx(0.9)}
    assert item.unaccounted == pytest.approx(0.0)


def test_a_wait_inside_work_is_idle_and_work_inside_a_wait_is_work():
    inside_work = [span("update", 0, 10), span("wait:data", 2, 6), span("micro_batch", 3, 4)]
    (item,) = lane_shares(inside_work, 0.0, 10.0).values()
    assert item.busy == pytest.approx(0.7) and item.waits == {"wait:data": pytest.approx(0.3)}


def test_a_window_without_length_is_refused():
    with pytest.raises(MetricsError, match="its end must come after its start"):
        lane_shares([], 3.0, 3.0)


def test_metrics_are_named_by_lane_and_by_kind_of_role():
    spans = [
        span("batch", 0, 8),
        span("wait:env", 8, 10),
        span("batch", 0, 4, role="policy1"),
        span("wait:batch", 4, 5, role="policy1"),
        span("receive", 0, 1, lane="weights"),
        span("chunk_step", 0, 5, role="env0", lane="shard 3"),
    ]
    metrics = utilisation_metrics(spans, 0.0, 10.0)
    assert metrics["lanes/policy0/inference/busy"] == pytest.approx(0.8)
    assert metrics["lanes/policy0/inference/wait_env"] == pytest.approx(0.2)
    assert metrics["lanes/policy0/weights/busy"] == pytest.approx(0.1)
    assert metrics["lanes/policy1/inference/unaccounted"] == pytest.approx(0.5)
    assert metrics["lanes/env0/shard_3/busy"] == pytest.approx(0.5)
    assert metrics["lanes/policy/busy"] == pytest.approx(0.6), "the mean of the inference lanes; weights is a side lane"
    assert metrics["lanes/policy/wait_env"] == pytest.approx(0.1)
    assert metrics["lanes/policy/wait_batch"] == pytest.approx(0.05)
    assert metrics["lanes/policy/wait_weights"] == metrics["lanes/policy/wait_data"] == 0.0
    assert metrics["lanes/policy/unaccounted"] == pytest.approx(0.25)
    assert metrics["lanes/dropped_spans"] == 0.0
    assert all(isinstance(value, float) for value in metrics.values())


def test_a_known_lane_that_recorded_nothing_counts_as_idle_without_a_cause():
    known = [("env0", "shard 0"), ("env0", "shard 1")]
    metrics = utilisation_metrics([span("chunk_step", 0, 10, *known[0])], 0.0, 10.0, known)
    assert metrics["lanes/env0/shard_1/busy"] == 0.0 and metrics["lanes/env0/shard_1/unaccounted"] == 1.0
    assert metrics["lanes/env/busy"] == pytest.approx(0.5)


def test_many_lanes_are_reported_by_role_alone():
    spans = [span("chunk_step", 0, i % 2, "env0", f"shard {i}") for i in range(100)]
    metrics = utilisation_metrics(spans, 0.0, 1.0)
    assert metrics["lanes/env/busy"] == pytest.approx(0.5)
    assert not [key for key in metrics if "shard" in key]


def test_dropped_spans_are_counted_and_are_no_lane():
    lost = Span("env0", DROPPED_LANE, "dropped", 0.0, 10.0, {"count": 7})
    metrics = utilisation_metrics([lost, span("batch", 0, 1)], 0.0, 10.0, known=[("env0", DROPPED_LANE)])
    assert metrics["lanes/dropped_spans"] == 7.0
    assert not [key for key in metrics if key.startswith("lanes/env")]


def test_lanes_of_a_kind_are_averaged_over_replicas():
    lanes = {
        ("env0", "shard 0"): Shares(0.5, {"wait:batch": 0.5}),
        ("env1", "shard 7"): Shares(1.0),
        ("driver", "step"): Shares(0.1),
    }
    groups = shares_by_kind(lanes)
    assert groups["env", "shard"] == (2, Shares(0.75, {"wait:batch": 0.25}))
    assert groups["driver", "step"] == (1, Shares(0.1))


def test_a_wait_across_the_end_of_a_step_counts_in_both_steps():
    """Processes are drained a little after a step's end; what reaches into the next step must not be lost to it."""
    cut = span("wait:env", 8, 10.5)._replace(args={"continues": True})
    first_drain, second_drain = [span("batch", 0, 8), cut], [span("wait:env", 10.5, 14), span("batch", 14, 20)]
    first = utilisation_metrics(first_drain, 0.0, 10.0)
    kept = carry_over(first_drain, 10.0)
    assert kept == [cut]
    second = utilisation_metrics(kept + second_drain, 10.0, 20.0)
    assert first["lanes/policy/wait_env"] == pytest.approx(0.2)
    assert second["lanes/policy/wait_env"] == pytest.approx(0.4)
    assert first["lanes/policy/unaccounted"] == pytest.approx(0.0)
    assert second["lanes/policy/unaccounted"] == pytest.approx(0.0)


def test_a_distribution_has_moments_quantiles_and_counts_that_add_up():
    metrics = distribution("batcher/wait_ms", list(range(101)), [0, 10, 50])
    assert metrics["batcher/wait_ms/mean"] == metrics["batcher/wait_ms/p50"] == 50.0
    assert metrics["batcher/wait_ms/p95"] == 95.0 and metrics["batcher/wait_ms/p99"] == 99.0
    assert sum(v for k, v in metrics.items() if "/hist/" in k) == 101
    assert metrics["batcher/wait_ms/hist/0_to_10"] == 10.0
    assert set(distribution("x", [], [0, 1]).values()) == {0.0}


def test_staleness_counts_every_age_up_to_the_limit_and_whatever_exceeds_it():
    assert staleness_metrics([0, 0, 1, 3], max_staleness=2) == {
        "staleness/0": 2.0,
        "staleness/1": 1.0,
        "staleness/2": 0.0,
        "staleness/3": 1.0,
        "staleness/mean": 1.0,
        "staleness/max": 3.0,
    }
    assert staleness_metrics([], max_staleness=1) == {"staleness/0": 0.0, "staleness/1": 0.0}
    many = staleness_metrics(np.array([0, 100, 200]))
    assert many["staleness/16_or_more"] == 2.0 and len(many) == 16 + 1 + 2


@pytest.mark.parametrize("values", [[-1], [0.5], [True, 1.5]])
def test_impossible_staleness_is_refused(values):
    with pytest.raises(MetricsError, match="whole numbers"):
        staleness_metrics(values)
