"""Swimlanes: what every thread of every process was doing, and what it waited for.

Each process has one ``Timeline`` (its role: ``env0``, ``policy0``, ``actor0``, ``driver``); each thread with a job of
its own records into a lane. A span is work, or, when its name starts with ``wait:``, waiting for what the name says::

    timeline = Timeline("policy0")
    with timeline.span("inference", "wait:env"):
        tickets = batcher.take()
    with timeline.span("inference", "batch", size=len(tickets), version=7):
        ...

The trainer drains all timelines once a step: ``telemetry.utilisation`` turns the spans into metrics, the report draws
them, and ``telemetry.trace`` appends them to ``trace.json`` in the run directory.

To look at a run in full, open https://ui.perfetto.dev ("Open trace file"; nothing is uploaded) or ``chrome://tracing``
("Load") and choose ``trace.json``. Every process is a group, every lane a row; W and S zoom, A and D move, a click on a
span shows its arguments. It works while the run is still going, and after it was killed.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple

from vla3_plugin.telemetry import clock

WAIT = "wait:"
WAITS = ("wait:env", "wait:batch", "wait:weights", "wait:data")
DROPPED_LANE = "timeline"  # spans that were lost are recorded here, so that a hole is not taken for idleness
TRAFFIC_LANE = "traffic"  # bytes that were counted: no work, see telemetry.traffic
NO_WORK = (DROPPED_LANE, TRAFFIC_LANE)
ROLES = ("driver", "actor", "policy", "env")  # from top to bottom, wherever lanes are listed


class Span(NamedTuple):
    """One stretch of work or waiting. A plain tuple of JSON values: it pickles to about 40 bytes among its like."""

    role: str
    lane: str
    name: str
    start: float  # seconds, clock.now(), which all processes of a machine share
    end: float
    args: dict[str, Any] | None = None

    @property
    def waits(self) -> bool:
        return self.name.startswith(WAIT)


def kind(name: str) -> str:
    """A role or lane without its number: ``env12`` is ``env``, ``shard 3`` is ``shard``."""
    return re.sub(r"[ _-]?\d+$", "", name) or name


def display_order(role: str, lane: str) -> tuple[Any, ...]:
    """Sort key of lanes: roles in the order of ``ROLES``, numbers by value (``shard 2`` before ``shard 10``)."""
    place = ROLES.index(kind(role)) if kind(role) in ROLES else len(ROLES)

    def natural(text: str) -> tuple[tuple[int, str], ...]:
        return tuple((int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", text))

    return place, natural(role), natural(lane)


class Timeline:
    """Records the spans of one process. Safe from any thread; a span costs a few microseconds.

    Memory is bounded: of more than ``limit`` spans between two drains the oldest are dropped. They are counted in
    ``dropped``, and ``drain`` reports them as one span of the lane ``timeline``.

    Raises:
        ValueError: ``limit`` below 1, or an empty ``role``.
    """

    def __init__(self, role: str, limit: int = 20000) -> None:
        if not role:
            raise ValueError("role is empty; expected what the process is, such as 'policy0'")
        if limit < 1:
            raise ValueError(f"limit is {limit}; expected the number of spans to hold between two drains, at least 1")
        self.role, self.limit = role, limit
        self.dropped = 0  # since the process began
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque()
        self._open: set[_OpenSpan] = set()
        self._lost: Span | None = None

    def span(self, lane: str, name: str, **args: Any) -> _OpenSpan:
        """Record the body of a ``with``. ``as args`` gives a dict to add what is known only later. A body that raises
        is recorded too, with the exception's type under ``error``."""
        return _OpenSpan(self, lane, name, args)

    def add(self, lane: str, name: str, start: float, end: float, **args: Any) -> None:
        """Record what ran from ``start`` to ``end`` (seconds, ``clock.now()``). An end before the start
        gives an empty span, not a negative one."""
        span = Span(self.role, lane, name, start, max(start, end), _plain(args) if args else None)
        with self._lock:
            self._append(span)

    def drain(self) -> list[Span]:
        """All spans since the last drain, oldest end first; they are forgotten here.

        A span that is still open is cut: the part up to now is handed out (``continues`` in its args), the rest comes
        with a later drain. Without that, whoever waits across the end of a step would seem to have done nothing.
        """
        with self._lock:
            now = clock.now()
            for open_span in self._open:
                if now > open_span.start:
                    args = _plain(open_span.args) | {"continues": True}
                    self._append(Span(self.role, open_span.lane, open_span.name, open_span.start, now, args))
                    open_span.start = now
            spans = list(self._spans)
            self._spans.clear()
            if self._lost is not None:
                spans.append(self._lost)
                self._lost = None
        return spans

    def _append(self, span: Span) -> None:
        """Lock held."""
        if len(self._spans) >= self.limit:
            old, lost = self._spans.popleft(), self._lost
            count = 1 + (lost.args["count"] if lost is not None and lost.args else 0)
            start, end = (old.start, old.end) if lost is None else (min(lost.start, old.start), max(lost.end, old.end))
            self._lost = Span(self.role, DROPPED_LANE, "dropped", start, end, {"count": count})
            self.dropped += 1
        self._spans.append(span)


class _OpenSpan:
    """The context manager of ``Timeline.span``: a class with slots is several times cheaper than a generator."""

    __slots__ = ("args", "lane", "name", "start", "timeline")

    def __init__(self, timeline: Timeline, lane: str, name: str, args: dict[str, Any]) -> None:
        self.timeline, self.lane, self.name, self.args = timeline, lane, name, args
        self.start = 0.0

    def __enter__(self) -> dict[str, Any]:
        timeline = self.timeline
        with timeline._lock:
            self.start = clock.now()
            timeline._open.add(self)
        return self.args

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline = self.timeline
        if error is not None:
            self.args["error"] = error.__name__
        args = _plain(self.args) if self.args else None
        with timeline._lock:
            timeline._open.discard(self)
            end = max(self.start, clock.now())
            timeline._append(Span(timeline.role, self.lane, self.name, self.start, end, args))


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON holds them: numpy and torch scalars as numbers, whatever is no scalar as text."""
    plain = {}
    for key, value in list(args.items()):
        if value is not None and type(value) not in (int, float, str, bool):
            try:
                value = value.item()
            except (AttributeError, ValueError, RuntimeError):  # no scalar: an object, numpy's error, torch's error
                value = str(value)
        plain[key] = value
    return plain
