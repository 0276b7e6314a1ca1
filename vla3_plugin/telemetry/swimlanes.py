"""The swimlanes in the report: one row a lane, time to the right, as inline SVG in the page's colours, and a table.

Work is drawn as full bars in cool colours, waiting as thin lines in warm ones: a bubble is where a row is thin. Spans
below a pixel are drawn together, as a bar as high as the part of its time that is work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from vla3_plugin.telemetry import charts, page
from vla3_plugin.telemetry.timeline import DROPPED_LANE, NO_WORK, WAIT, WAITS, Span, display_order, kind
from vla3_plugin.telemetry.trace import TRACE_FILE, TraceError, read_trace
from vla3_plugin.telemetry.utilisation import Lane, Segment, Shares, by_lane, flatten, shares, shares_by_kind

WIDTH, LABELS = 1040, 130  # in units of the view box; the page scales them to its width
PLOT = WIDTH - LABELS - 10
ROW, BAR, GAP, AXIS = 15, 11, 6, 20
MOST_ROWS = 72
MOST_MARKS = 4000  # the page stays below a megabyte
STEPS_SHOWN, SECONDS_SHOWN = 3, 30.0
_WORK = tuple(f"var(--series-{i})" for i in (0, 2, 4, 5, 7))
_WAITS = dict(zip(WAITS, ("var(--series-1)", "var(--series-6)", "var(--ink)", "var(--series-3)"), strict=True))


class Mark(NamedTuple):
    """One rectangle: from ``x`` to ``x + width`` in pixels of the plot, ``height`` a part of the bar."""

    x: float
    width: float
    height: float
    colour: str
    title: str


def section(run_dir: Path, rows: Sequence[Mapping[str, Any]], faults: list[str]) -> list[str]:
    """The report's section as a list of one, of none where the run recorded no trace. ``rows``: ``metrics.jsonl``."""
    try:
        spans = read_trace(run_dir / TRACE_FILE)
    except (TraceError, OSError) as error:
        faults.append(str(error))
        return []
    if not spans:
        return []
    steps = [(float(r["time"]), f"step {r['step']}") for r in rows if isinstance(r.get("time"), (int, float))]
    start, end, what = window(spans, steps)
    lost = sum((s.args or {}).get("count", 0) for s in spans if s.lane == DROPPED_LANE)
    note = f"{what}; the whole run is in {TRACE_FILE}, which ui.perfetto.dev and chrome://tracing open"
    drawing = page.figure("Who worked, who waited", note, swimlanes(spans, start, end, steps))
    parts = [f'<div class="charts wide">{drawing}</div>']
    if lost:
        parts.append(f'<p class="warning">{lost:,} spans of this run were dropped: what they covered looks idle.</p>')
    parts.append(f"<h3>Utilisation, {escape(what)}</h3>{utilisation_table(spans, start, end)}{_over_steps(rows)}")
    return [page.section("Swimlanes", "".join(parts))]


def window(spans: Sequence[Span], steps: Sequence[tuple[float, str]]) -> tuple[float, float, str]:
    """What to draw: the last training steps (what follows is evaluation), or the last seconds that were recorded."""
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    ends = [step for step in steps if first < step[0] <= last]
    ends += [step for step in steps if step[0] > last][:1]  # a step is logged a moment after its spans were handed over
    if len(ends) > 1:
        shown = ends[-STEPS_SHOWN - 1 :]
        numbers = dict.fromkeys((shown[1][1].split()[-1], shown[-1][1].split()[-1]))
        return shown[0][0], min(shown[-1][0], last), f"step{'s' * (len(numbers) > 1)} {' to '.join(numbers)}"
    start = max(first, last - SECONDS_SHOWN)
    end = max(last, start + 1e-6)  # a trace of one empty span
    return start, end, f"the last {end - start:.3g} seconds"


def swimlanes(spans: Iterable[Span], start: float, end: float, steps: Sequence[tuple[float, str]] = ()) -> str:
    """An SVG of all lanes in [start, end] (seconds, ``clock.now()``); ``steps``: ends of training steps, dotted lines.

    Raises:
        ValueError: the window is empty.
    """
    if not end > start:
        raise ValueError(f"window of the swimlanes from {start} to {end}; its end must come after its start")
    flat = _flat(spans, start, end)
    shown = dict(list(flat.items())[:MOST_ROWS])
    colours = _colours(flat)
    scale = PLOT / (end - start)
    least = 1.0
    while True:  # coarser until the page is small enough; two marks a row is the coarsest there is
        marks = {lane: _marks(segments, start, scale, least, colours) for lane, segments in shown.items()}
        if sum(map(len, marks.values())) <= MOST_MARKS or least > PLOT:
            break
        least *= 2
    body, top, role = [], float(AXIS), ""
    for lane, of_lane in marks.items():
        if lane[0] != role:
            role, top = lane[0], top + GAP
            body.append(_text(0, top + BAR - 2, role, "ink"))
        body.append(_text(LABELS - 8, top + BAR - 2, lane[1], "muted", "end"))
        body.append(f'<g transform="translate({LABELS} {top:g})">{"".join(map(_rect, of_lane))}</g>')
        top += ROW
    if len(flat) > len(shown):
        top += ROW
        body.append(_text(LABELS, top - 4, f"and {len(flat) - len(shown)} more lanes in {TRACE_FILE}", "muted"))
    body.insert(0, _axis(start, end, top, steps))
    legend, bottom = _legend(colours, top + 12)
    return (
        f'<svg role="img" aria-label="swimlanes" viewBox="0 0 {WIDTH} {bottom:g}" font-size="11">'
        f"{''.join(body)}{legend}</svg>"
    )


def utilisation_table(spans: Iterable[Span], start: float, end: float) -> str:
    """Shares of [start, end] by kind of lane, in percent."""
    lanes = {lane: shares(segments, end - start) for lane, segments in _flat(spans, start, end).items()}
    groups = shares_by_kind(lanes)
    causes = [cause for cause in WAITS if any(cause in item.waits for _, item in groups.values())]
    causes += sorted({cause for _, item in groups.values() for cause in item.waits} - set(WAITS))

    def cells(role: str, lane: str, count: int, item: Shares) -> list[str]:
        parts = [item.busy, *(item.waits.get(cause, 0.0) for cause in causes), item.unaccounted]
        return [escape(role), escape(lane), str(count), *(f"{100 * part:.1f}%" for part in parts)]

    head = [
        "role",
        "lane",
        "lanes",
        "working",
        *(f"waits for {escape(c.removeprefix(WAIT))}" for c in causes),
        "neither",
    ]
    return page.table(head, [cells(*group, *of_group) for group, of_group in groups.items()], text_columns=2)


def _over_steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """Curves over the run of what ``utilisation_metrics`` and ``staleness_metrics`` recorded."""
    steps = page.numbers(rows, "step")

    def curves(title: str, note: str, keys: Mapping[str, str]) -> str:
        lines = [charts.Line(n, steps, page.numbers(rows, k)) for n, k in keys.items() if any(k in r for r in rows)]
        return page.figure(title, note, charts.line_chart(lines, "step", title)) if lines else ""

    roles = sorted({k.split("/")[1] for r in rows for k in r if k.startswith("lanes/") and k.count("/") == 2})
    busy = curves("Working", "share of each step, mean over a role's lanes", {r: f"lanes/{r}/busy" for r in roles})
    age = {"mean": "staleness/mean", "largest": "staleness/max"}
    stale = curves("Staleness", "versions between a sample and the learner that trains on it", age)
    return f'<h3>Over the run</h3><div class="charts">{busy}{stale}</div>' if busy or stale else ""


def _flat(spans: Iterable[Span], start: float, end: float) -> dict[Lane, list[Segment]]:
    return {lane: flatten(of_lane, start, end) for lane, of_lane in by_lane(spans).items() if lane[1] not in NO_WORK}


def _colours(flat: Mapping[Lane, Sequence[Segment]]) -> dict[tuple[str, str], str]:
    """(kind of role, name of span) to colour: within a role the names that take longest have colours of their own."""
    seconds: dict[tuple[str, str], float] = {}
    for (role, _), segments in flat.items():
        for segment in segments:
            key = kind(role), segment.span.name
            seconds[key] = seconds.get(key, 0.0) + segment.seconds
    colours: dict[tuple[str, str], str] = {}
    used: dict[str, int] = {}
    for key in sorted(seconds, key=lambda key: -seconds[key]):
        if key[1].startswith(WAIT):
            colours[key] = _WAITS.get(key[1], "var(--muted)")
        else:
            colours[key] = _WORK[min(used.get(key[0], 0), len(_WORK) - 1)]
            used[key[0]] = used.get(key[0], 0) + 1
    return colours


def _marks(
    segments: Sequence[Segment], start: float, scale: float, least: float, colours: Mapping[tuple[str, str], str]
) -> list[Mark]:
    """Segments as rectangles; runs of segments narrower than ``least`` pixels are merged up to that width."""
    marks: list[Mark] = []
    run: list[Segment] = []

    def flush() -> None:
        if run:
            marks.append(_merged(run, start, scale, colours))
            run.clear()

    for segment in _rejoined(segments):
        if segment.seconds * scale >= least:
            flush()
            marks.append(_merged([segment], start, scale, colours))
            continue
        if run and (segment.end - run[0].start) * scale > max(least, 1.0) * 2:
            flush()
        run.append(segment)
    flush()
    return marks


def _rejoined(segments: Sequence[Segment]) -> list[Segment]:
    """Spans that were cut by a drain in one piece again."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last and last.end == segment.start and last.span.name == segment.span.name and _continues(last.span):
            joined[-1] = Segment(last.start, segment.end, segment.span)
        else:
            joined.append(segment)
    return joined


def _continues(span: Span) -> bool:
    return bool(span.args and span.args.get("continues"))


def _merged(run: Sequence[Segment], start: float, scale: float, colours: Mapping[tuple[str, str], str]) -> Mark:
    x, end = (run[0].start - start) * scale, (run[-1].end - start) * scale
    seconds: dict[str, float] = {}
    for segment in run:
        seconds[segment.span.name] = seconds.get(segment.span.name, 0.0) + segment.seconds
    work = {name: s for name, s in seconds.items() if not name.startswith(WAIT)}
    main = max(work or seconds, key=seconds.__getitem__)
    colour = colours[kind(run[0].span.role), main]
    length = run[-1].end - run[0].start
    height = max(0.25, sum(work.values()) / length) if work and length > 0 else 0.25
    if len(run) == 1:
        shown = {k: v for k, v in (run[0].span.args or {}).items() if k != "continues"}
        title = ", ".join([f"{main} {_seconds(length)}", *(f"{k} {_value(v)}" for k, v in shown.items())])
    else:
        parts = sorted(seconds.items(), key=lambda item: -item[1])
        title = f"{len(run)} spans in {_seconds(length)}: " + ", ".join(f"{n} {_seconds(s)}" for n, s in parts)
    return Mark(x, end - x, height, colour, title)


def _rect(mark: Mark) -> str:
    y = BAR / 2 * (1 - mark.height) if mark.height <= 0.25 else BAR * (1 - mark.height)
    # A hair of paper between neighbours of one colour keeps two batches from looking like one.
    width = max(mark.width - 0.4, 0.6)
    return (
        f'<rect x="{mark.x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR * mark.height:.1f}" '
        f'fill="{mark.colour}"><title>{escape(mark.title)}</title></rect>'
    )


def _axis(start: float, end: float, bottom: float, steps: Sequence[tuple[float, str]]) -> str:
    """Seconds since the window's start, at round distances, and the ends of steps."""
    scale = PLOT / (end - start)
    power = 10.0 ** math.floor(math.log10((end - start) / 8))
    tick = next(power * m for m in (1, 2, 5, 10) if (end - start) / (power * m) <= 8)
    parts = []
    for i in range(int((end - start) / tick) + 1):
        x = LABELS + i * tick * scale
        parts.append(f'<path d="M{x:.1f} {AXIS}V{bottom:g}" stroke="var(--grid)"/>')
        parts.append(_text(x, 12, _seconds(i * tick), "muted", "middle" if i else "start"))
    for time, name in steps:
        if start < time <= end:
            x = LABELS + (time - start) * scale
            parts.append(
                f'<path d="M{x:.1f} {AXIS}V{bottom:g}" stroke="var(--ink)" stroke-dasharray="2 3">'
                f"<title>{escape(name)} ends</title></path>"
            )
    return "".join(parts)


def _legend(colours: Mapping[tuple[str, str], str], top: float) -> tuple[str, float]:
    """Work by role, then the waits; and where it ends."""
    groups: dict[str, dict[str, str]] = {}
    for (role, name), colour in colours.items():
        if not name.startswith(WAIT):
            groups.setdefault(role, {})[name] = colour
    waits = {name.removeprefix(WAIT): colour for (_, name), colour in colours.items() if name.startswith(WAIT)}
    work = sorted(groups.items(), key=lambda item: display_order(item[0], ""))
    parts, x, y = [], float(LABELS), top
    for title, entries, thin in [*((role, names, False) for role, names in work), ("waits for", waits, True)]:
        if not entries:
            continue
        if x + _width(title, *entries) > WIDTH and x > LABELS:
            x, y = float(LABELS), y + 16
        parts.append(_text(x, y, title, "muted"))
        x += _width(title)
        for name, colour in entries.items():
            box = f'y="{y - 5}" height="3"' if thin else f'y="{y - 8.5}" height="9"'
            parts.append(f'<rect x="{x:.0f}" {box} width="9" fill="{colour}"/>')
            parts.append(_text(x + 13, y, name, "ink"))
            x += 13 + _width(name)
        x += 12
    return "".join(parts), y + 8


def _width(*words: str) -> float:
    """About the width of words and what stands around them, in a proportional font of 11 units."""
    return sum(6.0 * len(word) + 10 for word in words) + 13 * (len(words) - 1)


def _text(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="var(--{colour})"{place}>{escape(words)}</text>'


def _seconds(value: float) -> str:
    if value >= 1 or value == 0:
        return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"
    return f"{1000 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
