"""From spans to figures: how busy each lane was in a step, what the idle ones waited for, how old the samples were.

Every instant of a lane belongs to the innermost span that covers it (the one begun last). So nothing counts twice,
and a wait inside a longer piece of work is idle time: work that waits does not hide a bubble.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vla3_plugin.telemetry.metrics import MetricsError, aggregate, histogram
from vla3_plugin.telemetry.timeline import DROPPED_LANE, NO_WORK, WAIT, WAITS, Span, display_order, kind

# idle by design; they do not count in how busy a role is
SIDE_LANES = frozenset({"weights", "publication", "evaluation"})
MOST_LANES = 64  # more lanes than that are reported by role alone
MOST_STALENESS = 16

Lane = tuple[str, str]  # role, lane


class Segment(NamedTuple):
    """A part of ``span`` that is not covered by a span inside it."""

    start: float
    end: float
    span: Span

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Shares:
    """Parts of a window, each in [0, 1]: work, waiting by cause (``wait:env``), and what no span covers."""

    busy: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)

    @property
    def unaccounted(self) -> float:
        return max(0.0, 1.0 - self.busy - sum(self.waits.values()))


def flatten(spans: Iterable[Span], start: float, end: float) -> list[Segment]:
    """One lane in [start, end] as segments that do not overlap, in order: at each instant, the span begun last (of
    two begun together, the shorter). Gaps stay gaps."""
    inside = sorted((span for span in spans if min(span.end, end) > max(span.start, start)), key=lambda s: s.start)
    clipped = [(max(span.start, start), min(span.end, end)) for span in inside]
    bounds = sorted({bound for pair in clipped for bound in pair})
    active: list[tuple[float, float, int]] = []  # a heap with the span begun last on top
    segments: list[Segment] = []
    i = 0
    for low, high in zip(bounds, bounds[1:], strict=False):
        while i < len(inside) and clipped[i][0] <= low:
            heapq.heappush(active, (-inside[i].start, clipped[i][1], i))
            i += 1
        while active and active[0][1] <= low:
            heapq.heappop(active)
        if not active:
            continue
        span = inside[active[0][2]]
        if segments and segments[-1].end == low and segments[-1].span is span:
            segments[-1] = segments[-1]._replace(end=high)
        else:
            segments.append(Segment(low, high, span))
    return segments


def by_lane(spans: Iterable[Span]) -> dict[Lane, list[Span]]:
    """Spans by (role, lane), in the order of display."""
    lanes: dict[Lane, list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.role, span.lane), []).append(span)
    return {lane: lanes[lane] for lane in sorted(lanes, key=lambda lane: display_order(*lane))}


def shares(segments: Iterable[Segment], seconds: float) -> Shares:
    """What a lane did in a window of ``seconds``, from its flattened segments."""
    result = Shares()
    for segment in segments:
        if segment.span.waits:
            cause = segment.span.name
            result.waits[cause] = result.waits.get(cause, 0.0) + segment.seconds / seconds
        else:
            result.busy += segment.seconds / seconds
    return result


def lane_shares(spans: Iterable[Span], start: float, end: float, known: Iterable[Lane] = ()) -> dict[Lane, Shares]:
    """Shares of every lane in the window [start, end] (seconds, ``clock.now()``), in the order of display.

    ``known``: lanes that exist; one that recorded nothing is then reported as idle without a cause instead of missing.

    Raises:
        MetricsError: the window is empty.
    """
    if not end > start:
        raise MetricsError(f"window of utilisation from {start} to {end}; its end must come after its start")
    lanes: dict[Lane, list[Span]] = {lane: [] for lane in known} | by_lane(spans)
    order = sorted((lane for lane in lanes if lane[1] not in NO_WORK), key=lambda lane: display_order(*lane))
    return {lane: shares(flatten(lanes[lane], start, end), end - start) for lane in order}


def mean_shares(items: Sequence[Shares]) -> Shares:
    """Mean over lanes, each weighing the same."""
    causes = dict.fromkeys(cause for item in items for cause in item.waits)
    waits = {cause: sum(item.waits.get(cause, 0.0) for item in items) / len(items) for cause in causes}
    return Shares(sum(item.busy for item in items) / len(items), waits)


def shares_by_kind(lanes: Mapping[Lane, Shares]) -> dict[Lane, tuple[int, Shares]]:
    """(kind of role, kind of lane) to the number of such lanes and their mean: all shards, all replicas together."""
    groups: dict[Lane, list[Shares]] = {}
    for (role, lane), item in lanes.items():
        groups.setdefault((kind(role), kind(lane)), []).append(item)
    return {group: (len(items), mean_shares(items)) for group, items in groups.items()}


def utilisation_metrics(
    spans: Iterable[Span], start: float, end: float, known: Iterable[Lane] = (), most_lanes: int = MOST_LANES
) -> dict[str, float]:
    """Metrics of one step, shares of its window [start, end].

    Per lane ``lanes/policy0/inference/busy``, ``…/wait_env`` (causes that occurred) and ``…/unaccounted``; per kind of
    role ``lanes/policy/busy``, ``…/wait_env`` (always the four causes) and ``…/unaccounted``: the mean over its lanes,
    without ``SIDE_LANES``. ``lanes/dropped_spans`` counts spans that were lost; where it is not 0, the shares of that
    step are too low.
    """
    spans = list(spans)
    lanes = lane_shares(spans, start, end, known)
    metrics: dict[str, float] = {}
    roles: dict[str, list[Shares]] = {}
    for (role, lane), item in lanes.items():
        if len(lanes) <= most_lanes:
            metrics |= _keys(f"lanes/{role}/{lane.replace(' ', '_')}", item)
        if lane not in SIDE_LANES:
            roles.setdefault(kind(role), []).append(item)
    for role, items in roles.items():
        mean = mean_shares(items)
        metrics |= _keys(f"lanes/{role}", Shares(mean.busy, dict.fromkeys(WAITS, 0.0) | mean.waits))
    lost = (span.args or {} for span in spans if span.lane == DROPPED_LANE)
    return metrics | {"lanes/dropped_spans": float(sum(args.get("count", 0) for args in lost))}


def _keys(prefix: str, item: Shares) -> dict[str, float]:
    waits = {f"{prefix}/wait_{cause.removeprefix(WAIT)}": share for cause, share in item.waits.items()}
    return {f"{prefix}/busy": item.busy, **waits, f"{prefix}/unaccounted": item.unaccounted}


def carry_over(spans: Iterable[Span], end: float) -> list[Span]:
    """Spans that reach past the window's end: put them before those of the next step. (Processes are drained a little
    after the step's end, and forget what they handed over.)"""
    return [span for span in spans if span.end > end and span.lane not in NO_WORK]


# ---------------------------------------------------------------- distributions


def distribution(name: str, values: Sequence[float] | np.ndarray, edges: Sequence[float]) -> dict[str, float]:
    """``name/mean``, ``/min``, ``/max``, ``/p50``, ``/p95``, ``/p99`` and the counts of ``metrics.histogram``; of no
    values only the counts, all 0. For batch sizes, waits in milliseconds, queue depths.

    Raises:
        MetricsError: NaN among the values, or edges that are not increasing.
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    counts = histogram(name, data, edges)
    if data.size == 0:
        return counts
    marks = {f"{name}/p{q}": float(np.percentile(data, q)) for q in (50, 95, 99)}
    return aggregate(name, data) | marks | counts


def staleness_metrics(values: Sequence[int] | np.ndarray, max_staleness: int = 0) -> dict[str, float]:
    """Samples by how many versions old they were when trained on: ``staleness/0``, ``staleness/1``, … are counts,
    ``staleness/mean`` and ``staleness/max`` their summary (absent with no sample).

    Every count up to ``max_staleness`` is present, so that curves have no gaps; older samples, should there be any, are
    shown too, from 16 on together as ``staleness/16_or_more``.

    Raises:
        MetricsError: a sample newer than the learner (negative staleness), or not a whole number.
    """
    data = np.asarray(values).ravel()
    if data.size and (data.dtype.kind not in "iu" or data.min() < 0):
        raise MetricsError(f"staleness {data[:5].tolist()}…: expected whole numbers of at least 0 (learner - sample)")
    most = max(max_staleness, int(data.max()) if data.size else 0)
    metrics = {f"staleness/{age}": float((data == age).sum()) for age in range(min(most + 1, MOST_STALENESS))}
    if most >= MOST_STALENESS:
        metrics[f"staleness/{MOST_STALENESS}_or_more"] = float((data >= MOST_STALENESS).sum())
    if data.size:
        metrics |= {"staleness/mean": float(data.mean()), "staleness/max": float(data.max())}
    return metrics
