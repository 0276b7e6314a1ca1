"""The trace file: what viewers need of it, a kill at any byte, a resumed run, bounded size."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from vla3_plugin.telemetry.timeline import Span
from vla3_plugin.telemetry.trace import PREVIOUS_FILE, TRACE_FILE, TraceError, TraceWriter, read_trace

T = 1_700_000_000.0
SPANS = [
    Span("policy0", "inference", "batch", T, T + 0.5, {"size": 8, "version": 1}),
    Span("policy0", "weights", "receive", T + 0.1, T + 0.2),
    Span("env1", "shard 10", "wait:batch", T + 0.1, T + 0.4),
    Span("env1", "shard 2", "chunk_step", T + 0.25, T + 0.75),
    Span("env0", "shard 2", "chunk_step", T + 0.5, T + 1.0),
]


def close(path) -> list[dict]:
    """The events as a strict parser sees them once the array is closed, which is what viewers do themselves."""
    return json.loads(path.read_text() + "\n]", parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))


def write(run_dir, spans=SPANS, **options) -> None:
    with TraceWriter(run_dir, **options) as writer:
        writer.append(spans)


def rounded(spans: list[Span]) -> list[Span]:
    return [s._replace(start=round(s.start * 1e6) / 1e6, end=round(s.end * 1e6) / 1e6) for s in spans]


def test_the_file_is_the_array_form_without_its_bracket_at_every_moment(tmp_path):
    with TraceWriter(tmp_path) as writer:
        for span in SPANS:
            writer.append([span])
            events = close(tmp_path / TRACE_FILE)
            assert events[-1]["name"] == span.name


def test_events_have_what_the_format_demands(tmp_path):
    write(tmp_path)
    events = close(tmp_path / TRACE_FILE)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(SPANS)
    for event, span in zip(spans, SPANS, strict=True):
        assert event["ts"] == round(span.start * 1e6) and event["dur"] == round((span.end - span.start) * 1e6)
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
        assert event["cat"] == ("wait" if span.name.startswith("wait:") else "work")
    assert spans[0]["args"] == {"size": 8, "version": 1} and "args" not in spans[1]


def test_roles_are_named_processes_and_lanes_named_threads(tmp_path):
    write(tmp_path)
    events = close(tmp_path / TRACE_FILE)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {e["tid"]: (names[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["env0", "env1", "policy0"]
    assert sorted(lanes.values()) == sorted({(s.role, s.lane) for s in SPANS}), "thread ids are unique in the file"
    assert not set(names) & set(lanes), "a thread with its process's id would be shown as the main thread"
    for event in events:
        if event["ph"] == "X":
            assert lanes[event["tid"]][0] == names[event["pid"]]


def test_viewers_are_told_to_sort_rows_by_role_and_number(tmp_path):
    write(tmp_path)
    events = close(tmp_path / TRACE_FILE)
    names = {e.get("tid", e["pid"]): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    order = {
        names[e.get("tid", e["pid"])]: e["args"]["sort_index"] for e in events if "sort_index" in e.get("args", {})
    }
    assert order["policy0"] < order["env0"] < order["env1"]
    assert order["shard 2"] < order["shard 10"]


def test_what_was_written_is_read_back(tmp_path):
    write(tmp_path)
    assert read_trace(tmp_path / TRACE_FILE) == rounded(SPANS)
    assert read_trace(tmp_path / "absent.json") == []


def test_neighbours_stay_neighbours_after_rounding_to_microseconds(tmp_path):
    ends = [T + i * 1e-4 / 3 for i in range(200)]
    write(tmp_path, [Span("a", "b", "c", x, y) for x, y in zip(ends, ends[1:], strict=False)])
    events = [e for e in close(tmp_path / TRACE_FILE) if e["ph"] == "X"]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in zip(events, events[1:], strict=False))


def test_a_resumed_run_goes_on_in_the_same_rows(tmp_path):
    write(tmp_path, SPANS[:3])
    write(tmp_path, SPANS[2:])
    events = close(tmp_path / TRACE_FILE)
    assert read_trace(tmp_path / TRACE_FILE) == rounded(SPANS[:3] + SPANS[2:])
    named = [(e["pid"], e.get("tid")) for e in events if e["name"] in ("process_name", "thread_name")]
    assert len(named) == len(set(named)) == 3 + 5, "each process and each lane is named once"


def test_a_file_torn_at_any_byte_is_read_up_to_the_tear_and_continued(tmp_path):
    write(tmp_path)
    path = tmp_path / TRACE_FILE
    data, whole = path.read_bytes(), rounded(SPANS)
    # Every byte of the beginning and of the last events, every seventh of what lies between.
    for cut in sorted({*range(120), *range(120, len(data), 7), *range(len(data) - 250, len(data) + 1)}):
        path.write_bytes(data[:cut])
        survived = read_trace(path)
        assert survived == whole[: len(survived)]
        write(tmp_path, SPANS)
        close(path)
        assert read_trace(path) == survived + whole, f"torn at byte {cut}"
    assert len(survived) == len(whole), "the uncut file loses nothing"


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_trace_that_opens(tmp_path):
    program = (
        "import sys\n"
        "from vla3_plugin.telemetry.timeline import Span\n"
        "from vla3_plugin.telemetry.trace import TraceWriter\n"
        "writer, i = TraceWriter(sys.argv[1]), 0\n"
        "while True:\n"
        "    writer.append([Span('env0', 'shard 0', 'chunk_step', i + k, i + k + 1) for k in range(500)])\n"
        "    i += 500\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    path = tmp_path / TRACE_FILE
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 200_000:
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    spans = read_trace(path)
    assert [s.start for s in spans] == [float(i) for i in range(len(spans))] and len(spans) > 1000
    write(tmp_path, SPANS)
    close(path)
    assert len(read_trace(path)) == len(spans) + len(SPANS)


def test_a_file_closed_by_another_tool_is_read_and_continued(tmp_path):
    write(tmp_path, SPANS[:2])
    path = tmp_path / TRACE_FILE
    path.write_text(path.read_text() + "\n]\n")
    assert read_trace(path) == rounded(SPANS[:2])
    write(tmp_path, SPANS[2:])
    close(path)
    assert read_trace(path) == rounded(SPANS)


def test_the_file_is_bounded_and_the_one_before_it_kept(tmp_path):
    with TraceWriter(tmp_path, limit_bytes=4000) as writer:
        for i in range(200):
            writer.append([Span("env0", "shard 0", "chunk_step", T + i, T + i + 1)])
    sizes = [(tmp_path / name).stat().st_size for name in (TRACE_FILE, PREVIOUS_FILE)]
    assert max(sizes) < 4500 and len(list(tmp_path.iterdir())) == 2
    both = read_trace(tmp_path / PREVIOUS_FILE) + read_trace(tmp_path / TRACE_FILE)
    assert [s.start for s in both] == [T + i for i in range(200 - len(both), 200)], "nothing between them is lost"
    close(tmp_path / PREVIOUS_FILE)


def test_a_number_that_json_lacks_does_not_spoil_the_file(tmp_path):
    write(tmp_path, [Span("a", "b", "c", T, T + 1, {"loss": math.nan, "bound": math.inf, "text": 'quote " \n'})])
    (event,) = [e for e in close(tmp_path / TRACE_FILE) if e["ph"] == "X"]
    assert event["args"] == {"loss": "nan", "bound": "inf", "text": 'quote " \n'}


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    write(tmp_path)
    path = tmp_path / TRACE_FILE
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]))
    with pytest.raises(TraceError, match="line 4"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": []}\n', "expected '\\[' alone"),
        ('[\n{"ph": "X", "name": "f", "pid": 9, "tid": 9, "ts": 1, "dur": 1}', "lacks 9"),
    ],
)
def test_a_trace_of_another_tool_is_refused(tmp_path, text, message):
    (tmp_path / TRACE_FILE).write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / TRACE_FILE)


def test_an_empty_drain_writes_nothing(tmp_path):
    write(tmp_path, [])
    assert (tmp_path / TRACE_FILE).stat().st_size == 0
    assert read_trace(tmp_path / TRACE_FILE) == []
