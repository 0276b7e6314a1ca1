"""``trace.json``: the spans of all processes in Chrome's trace event format, which Perfetto and chrome://tracing open.

The file is the format's array form, one event a line, without the closing bracket: the format allows that, so the file
can be opened while the run is going and after it was killed. Roles are processes, lanes are threads, spans are complete
("X") events of category ``work`` or ``wait``, times are microseconds since 1970.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vla3_plugin.telemetry.timeline import Span, display_order

TRACE_FILE = "trace.json"
PREVIOUS_FILE = "trace.previous.json"
LIMIT_BYTES = 64 << 20  # about half a million spans; viewers stay quick with that


class TraceError(ValueError):
    """A file that is not a trace of ours."""


class TraceWriter:
    """Appends spans to ``run_dir/trace.json``; one process writes, from one thread.

    A run that resumes goes on in the same file with the same rows. Disk use is bounded: a file that reaches
    ``limit_bytes`` becomes ``trace.previous.json`` (the one before it goes), and a new one is begun.

    Raises:
        TraceError: ``trace.json`` exists and is something else.
        OSError: the file cannot be written.
    """

    def __init__(self, run_dir: Path | str, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path, self.limit_bytes = Path(run_dir) / TRACE_FILE, limit_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}
        if self.path.exists():
            _cut_torn_event(self.path)
            for event in _events(self.path):
                self._remember(event)
        self._file = open(self.path, "ab", buffering=0)

    def append(self, spans: Iterable[Span]) -> None:
        """Write spans of any roles, in any order, with one write: a kill in the middle tears at most the last event of
        the file, and reading and resuming drop that one."""
        spans = sorted(spans, key=lambda span: span.start)
        if not spans:
            return
        if self._file.tell() >= self.limit_bytes:
            self._begin_anew()
        lines: list[str] = []
        for span in spans:
            lines += self._names(span)
            lines.append(json.dumps(self._event(span), ensure_ascii=False, allow_nan=False, separators=(",", ":")))
        lead = "[\n" if self._file.tell() == 0 else ",\n"
        start, data = os.fstat(self._file.fileno()).st_size, memoryview((lead + ",\n".join(lines)).encode())
        try:
            while data:  # the system may take less than everything (disk nearly full)
                data = data[self._file.write(data) :]
        except OSError as error:  # a picture with a hole is no reason to end a run
            self._file.truncate(start)
            print(f"vla3: {self.path}: {error}; {len(spans)} spans are not in it", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_anew(self) -> None:
        self._file.close()
        os.replace(self.path, self.path.with_name(PREVIOUS_FILE))
        self._pids, self._tids = {}, {}
        self._file = open(self.path, "ab", buffering=0)

    def _event(self, span: Span) -> dict[str, Any]:
        # Whole microseconds, and the duration from the rounded ends: neighbours stay neighbours.
        start, end = round(span.start * 1e6), round(span.end * 1e6)
        event: dict[str, Any] = {
            "ph": "X",
            "name": span.name,
            "cat": "wait" if span.waits else "work",
            "pid": self._pids[span.role],
            "tid": self._tids[span.role, span.lane],
            "ts": start,
            "dur": end - start,
        }
        if span.args:
            event["args"] = {k: v if _finite(v) else str(v) for k, v in span.args.items()}
        return event

    def _names(self, span: Span) -> list[str]:
        """Metadata events for a role or a lane that the file does not name yet."""
        events: list[dict[str, Any]] = []
        if span.role not in self._pids:
            pid = self._pids[span.role] = 1 + max(self._pids.values(), default=0)
            # Viewers sort processes by one whole number: the kind of role first, then its own number.
            place, number, _ = display_order(span.role, "")
            index = 10_000 * place + (number[1][0] if len(number) > 1 else 0)
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": span.role}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": index}})
        if (span.role, span.lane) not in self._tids:
            # Thread ids are unique in the file, and never a process id: viewers take such a thread for the main one.
            tid = self._tids[span.role, span.lane] = 1 + max(self._tids.values(), default=1_000_000)
            both = {"ph": "M", "pid": self._pids[span.role], "tid": tid}
            _, _, number = display_order("", span.lane)
            index = number[1][0] if len(number) > 1 else 0
            events.append({**both, "name": "thread_name", "args": {"name": span.lane}})
            events.append({**both, "name": "thread_sort_index", "args": {"sort_index": index}})
        return [json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in events]

    def _remember(self, event: dict[str, Any]) -> None:
        if event.get("name") == "process_name":
            self._pids[event["args"]["name"]] = event["pid"]
        elif event.get("name") == "thread_name":
            role = next(role for role, pid in self._pids.items() if pid == event["pid"])
            self._tids[role, event["args"]["name"]] = event["tid"]


def read_trace(path: Path | str) -> list[Span]:
    """The spans of a ``trace.json``, in the file's order; none if it does not exist. A torn last event is ignored.

    Raises:
        TraceError: a line is not an event, or an event belongs to a lane that no metadata event names.
    """
    roles: dict[int, str] = {}
    lanes: dict[int, str] = {}
    spans: list[Span] = []
    for event in _events(Path(path)) if Path(path).exists() else ():
        try:
            if event["name"] == "process_name":
                roles[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                lanes[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                spans.append(
                    Span(roles[event["pid"]], lanes[event["tid"]], event["name"], start, end, event.get("args"))
                )
        except (KeyError, TypeError) as error:
            raise TraceError(
                f"{path}: event {str(event)[:80]} lacks {error}; was it written by another tool?"
            ) from error
    return spans


def _events(path: Path) -> Iterable[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    if lines[0].strip() not in (b"", b"["):
        raise TraceError(f"{path}: starts with {lines[0][:40]!r}, expected '[' alone; move the file away to begin anew")
    for i, line in enumerate(lines):
        line = line.strip().removesuffix(b",")
        if line in (b"", b"[", b"]"):
            continue
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if i == len(lines) - 1:
                return
            raise TraceError(f"{path}, line {i + 1}: {line[:60]!r} is not an event ({error})") from error
        yield event


def _cut_torn_event(path: Path) -> None:
    """Cut the last line off if it is half an event, lest the next one be glued to it; and a closing bracket."""
    data = path.read_bytes()
    kept = data.rstrip(b"\n ,]")
    last = kept[kept.rfind(b"\n") + 1 :]
    try:
        if last not in (b"", b"["):
            json.loads(last)
    except ValueError:
        kept = kept[: max(0, kept.rfind(b"\n"))].rstrip(b"\n ,")
    if kept == b"[":
        kept = b""
    if len(kept) < len(data):
        os.truncate(path, len(kept))


def _finite(value: Any) -> bool:
    """JSON has no NaN, and a viewer refuses the whole file for one."""
    return not isinstance(value, float) or math.isfinite(value)
