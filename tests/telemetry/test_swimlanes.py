"""The drawing: what it shows, that it stays small, and its place in the report."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from vla3_plugin.telemetry.metrics import MetricsWriter
from vla3_plugin.telemetry.report import write_report
from vla3_plugin.telemetry.swimlanes import BAR, LABELS, MOST_MARKS, PLOT, WIDTH, swimlanes, utilisation_table, window
from vla3_plugin.telemetry.timeline import DROPPED_LANE, Span
from vla3_plugin.telemetry.trace import TRACE_FILE, TraceWriter

T = 1_700_000_000.0


def lane(role: str, name: str, *parts: tuple[str, float], start: float = T) -> list[Span]:
    """Spans one after the other; a part of name "" is a gap."""
    spans = []
    for what, seconds in parts:
        if what:
            spans.append(Span(role, name, what, start, start + seconds))
        start += seconds
    return spans


def marks(svg: str) -> list[tuple[dict[str, str], str]]:
    """Attributes and tooltip of every mark."""
    return [(e.attrib, e[0].text or "") for e in ET.fromstring(svg).iter("rect") if len(e)]


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg).iter("text")]


def test_a_lane_is_drawn_to_scale_work_high_and_waits_thin():
    spans = lane("policy0", "inference", ("batch", 2), ("wait:env", 3), ("", 1), ("batch", 4))
    drawn = marks(swimlanes(spans, T, T + 10))
    assert [title for _, title in drawn] == ["batch 2 s", "wait:env 3 s", "batch 4 s"]
    for (attributes, _), x, seconds in zip(drawn, (0, 2, 6), (2, 3, 4), strict=True):
        assert float(attributes["x"]) == pytest.approx(x / 10 * PLOT, abs=0.1)
        assert float(attributes["width"]) == pytest.approx(seconds / 10 * PLOT, abs=0.5)
    assert [float(a["height"]) > BAR / 2 for a, _ in drawn] == [True, False, True]
    fills = [a["fill"] for a, _ in drawn]
    assert fills[0] == fills[2] != fills[1] and all(f.startswith("var(--") for f in fills)


def test_lanes_are_rows_in_order_of_role_and_number_with_their_names():
    spans = lane("env0", "shard 10", ("chunk_step", 1)) + lane("env0", "shard 2", ("chunk_step", 1))
    spans += lane("driver", "step", ("update", 1)) + lane("policy0", "inference", ("batch", 1))
    svg = swimlanes(spans, T, T + 1)
    names = [t for t in texts(svg) if t in {"driver", "step", "policy0", "inference", "env0", "shard 2", "shard 10"}]
    assert names[:7] == ["driver", "step", "policy0", "inference", "env0", "shard 2", "shard 10"]
    rows = [float(y) for y in re.findall(rf"translate\({LABELS} ([\d.]+)\)", svg)]
    assert rows == sorted(rows) and len(set(rows)) == 4


def test_the_legend_names_every_kind_of_work_and_every_cause_of_waiting():
    spans = lane("env0", "shard 0", ("chunk_step", 3), ("reset", 1), ("wait:batch", 1), ("wait:data", 1))
    words = texts(swimlanes(spans, T, T + 6))
    for word in ("chunk_step", "reset", "waits for", "batch", "data"):
        assert word in words, word


def test_tooltips_tell_what_a_batch_was_and_names_are_no_markup():
    spans = [Span("policy0", "<b>", "batch", T, T + 1, {"size": 8, "version": 3, "note": "<i>"})]
    svg = swimlanes(spans, T, T + 1)
    assert marks(svg)[0][1] == "batch 1 s, size 8, version 3, note <i>"
    assert "<b>" not in svg and "<i>" not in svg


def test_a_span_cut_by_a_drain_is_one_bar_again():
    cut = Span("policy0", "inference", "wait:env", T, T + 1, {"continues": True})
    drawn = marks(swimlanes([cut, Span("policy0", "inference", "wait:env", T + 1, T + 3)], T, T + 4))
    assert [title for _, title in drawn] == ["wait:env 3 s"]
    apart = [cut._replace(args=None), cut._replace(start=T + 1, end=T + 3)]
    assert len(marks(swimlanes(apart, T, T + 4))) == 2, "two batches in a row are two bars"


def test_spans_below_a_pixel_are_merged_to_bars_as_high_as_their_work():
    spans = lane("policy0", "inference", *[("batch", 0.0002), ("wait:env", 0.0006)] * 5000)
    drawn = marks(swimlanes(spans, T, T + 4.1))
    assert len(drawn) < PLOT
    assert all(float(a["height"]) == pytest.approx(0.25 * BAR, abs=0.15 * BAR) for a, _ in drawn)
    total = sum(int(title.split()[0]) for _, title in drawn)
    assert total == 10_000, "every span is in one of them"
    assert "batch" in drawn[0][1] and "wait:env" in drawn[0][1]


def test_a_short_span_between_long_waits_is_still_seen():
    spans = lane("policy0", "weights", ("wait:weights", 30), ("swap", 0.001), ("wait:weights", 30))
    drawn = [(a, t) for a, t in marks(swimlanes(spans, T, T + 60.001)) if "swap" in t]
    assert len(drawn) == 1 and float(drawn[0][0]["width"]) >= 0.5 and float(drawn[0][0]["height"]) == BAR


@pytest.mark.parametrize("lanes", [1, 40, 300])
def test_any_number_of_lanes_and_spans_stays_small(lanes):
    each = 30_000 // lanes
    spans = [s for i in range(lanes) for s in lane("env0", f"shard {i}", *[("chunk_step", 0.1), ("", 0.1)] * each)]
    svg = swimlanes(spans, T, T + 0.2 * each)
    assert len(marks(svg)) <= MOST_MARKS and len(svg) < 700_000
    if lanes == 300:
        assert "more lanes in trace.json" in " ".join(texts(svg))


def test_everything_lies_inside_the_drawing():
    spans = [s for i in range(40) for s in lane(f"env{i}", "shard 0", ("chunk_step", 5), ("wait:batch", 7))]
    spans += [Span("driver", "step", f"work {i}", T - 100, T + 100) for i in range(9)]
    svg = swimlanes(spans, T, T + 10, [(T + 5, "step 3"), (T + 50, "step 4")])
    root = ET.fromstring(svg)
    width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
    assert width == WIDTH
    for attributes, _ in marks(svg):
        assert float(attributes["x"]) >= 0
        assert LABELS + float(attributes["x"]) + float(attributes["width"]) <= width
    assert all(float(e.attrib["y"]) <= height for e in root.iter("text"))
    assert "step 3 ends" in svg and "step 4 ends" not in svg


def test_the_table_gives_shares_by_kind_of_lane():
    spans = lane("env0", "shard 0", ("chunk_step", 6), ("wait:batch", 4))
    spans += lane("env1", "shard 0", ("chunk_step", 2), ("wait:batch", 4), ("", 4))
    assert re.sub(r"<[^>]+>", " ", utilisation_table(spans, T, T + 10)).split() == (
        "role lane lanes working waits for batch neither env shard 2 40.0% 40.0% 20.0%".split()
    )


def test_the_window_is_the_last_steps_or_the_last_seconds():
    spans = lane("driver", "step", *[("update", 10)] * 10)
    steps = [(T + 10 * i + 0.5, f"step {i}") for i in range(1, 9)]
    start, end, what = window(spans, steps)
    assert (start, end, what) == (T + 50.5, T + 80.5, "steps 6 to 8"), "what follows the last step is evaluation"
    late = [*steps, (T + 100.2, "step 9")]
    assert window(spans, late) == (T + 60.5, T + 100, "steps 7 to 9"), "a step is logged just after its spans"
    assert window(spans, steps[:2])[2] == "step 2"
    assert window(spans, []) == (T + 70, T + 100, "the last 30 seconds")
    assert window(spans[:1], []) == (T, T + 10, "the last 10 seconds")
    instant = [Span("driver", "step", "update", T, T)]
    assert window(instant, [])[1] > T


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="its end must come after its start"):
        swimlanes([], T, T)


def write_run(run_dir, spans: list[Span], metrics: dict[str, float]) -> str:
    with TraceWriter(run_dir) as writer:
        writer.append(spans)
    writer = MetricsWriter(run_dir)
    for step in range(1, 4):
        writer.log(step, metrics)
    writer.close()
    return write_report(run_dir).read_text()


def test_the_report_of_a_traced_run_shows_lanes_table_and_curves(tmp_path):
    spans = lane("policy0", "inference", ("batch", 6), ("wait:env", 4))
    metrics = {"lanes/policy/busy": 0.6, "staleness/mean": 0.5, "staleness/max": 1.0}
    page = write_run(tmp_path, spans, metrics)
    assert "<h2>Swimlanes</h2>" in page and "batch 6 s</title>" in page
    for words in ("the last 10 seconds", "waits for env", "60.0%", "Working", "Staleness"):
        assert words in page, words
    assert page.count("<svg") == 3 and "http" not in page


def test_the_report_of_a_run_without_a_trace_has_no_such_section(tmp_path):
    MetricsWriter(tmp_path).close()
    assert "Swimlanes" not in write_report(tmp_path).read_text()


def test_lost_spans_are_said_in_the_report(tmp_path):
    spans = lane("env0", "shard 0", ("chunk_step", 6))
    page = write_run(tmp_path, [*spans, Span("env0", DROPPED_LANE, "dropped", T, T + 1, {"count": 1234})], {})
    assert "1,234 spans of this run were dropped" in page


def test_a_damaged_trace_is_named_and_the_rest_of_the_report_shown(tmp_path):
    (tmp_path / TRACE_FILE).write_text(json.dumps({"traceEvents": []}))
    page = write_report(tmp_path).read_text()
    assert "trace.json: starts with" in page and "<h2>Learning</h2>" in page
