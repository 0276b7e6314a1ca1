"""What the machinery around the work costs on this machine: ``HostCosts`` read from the spans of runs that were made.

Every cost is a median over spans, so the first steps, which warm caches up, hardly count. Costs with a part per row or
sample are lines through the medians of the runs, as far as these differ in size; a cost that no run shows stays 0.
"""

from __future__ import annotations

import bisect
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from vla3_plugin.placement.simulate_model import HostCosts, Workload, workload_of

_STEADY = 2  # steps of a run that are not looked at
_DELIVERY_MS = 1.0  # a loop's pause between two spans that is longer than this was spent on finished episodes


class Span(NamedTuple):
    start: float  # ms since the run's first span
    ms: float
    args: dict[str, Any]

    @property
    def end(self) -> float:
        return self.start + self.ms


Lanes = dict[tuple[str, str], dict[str, list[Span]]]  # (process, lane) -> name -> spans in order


def read_trace(path: Path) -> Lanes:
    """The spans of a run's ``trace.json``; a last line that was cut off is left out.

    Raises:
        ValueError: it holds no spans.
    """
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line.strip().lstrip("[").rstrip(",]")))
        except json.JSONDecodeError:
            continue
    names = {(e["pid"], e.get("tid"), e["name"]): e["args"]["name"] for e in events if e.get("ph") == "M"
             and "name" in e.get("args", {})}  # fmt: skip
    processes = {pid: name for (pid, _, what), name in names.items() if what == "process_name"}
    threads = {(pid, tid): name for (pid, tid, what), name in names.items() if what == "thread_name"}
    spans = [e for e in events if e.get("ph") == "X"]
    if not spans:
        raise ValueError(f"{path}: no spans; expected the trace.json of a run")
    first = min(e["ts"] for e in spans)
    lanes: Lanes = defaultdict(lambda: defaultdict(list))
    for e in sorted(spans, key=lambda e: e["ts"]):
        lane = (processes[e["pid"]], threads[e["pid"], e["tid"]])
        lanes[lane][e["name"]].append(Span((e["ts"] - first) / 1e3, e["dur"] / 1e3, e.get("args") or {}))
    return lanes


@dataclass(frozen=True)
class Run:
    """A finished run of the emulator: its workload, its spans, and its metrics step by step."""

    work: Workload
    lanes: Lanes
    rows: list[dict[str, Any]]

    def spans(self, process: str, lane: str, name: str) -> list[Span]:
        """Of all processes and lanes whose names begin so, after the first steps."""
        steady = self.steady
        found = [
            s for (p, n), spans in self.lanes.items() if p.startswith(process) and n.startswith(lane)
            for s in spans.get(name, ()) if s.start >= steady
        ]  # fmt: skip
        return sorted(found)

    @property
    def steady(self) -> float:
        published = sorted(s.end for s in self.lanes[("driver", "publication")].get("publish", ()))
        return published[_STEADY] if len(published) > _STEADY else 0.0

    def samples(self) -> float:
        return statistics.mean(row["rollout/chunk_steps"] for row in self.rows[_STEADY:] or self.rows)


def read_run(directory: Path) -> Run:
    """
    Raises:
        ValueError: not the directory of a run of the emulator.
        OSError: files are missing.
    """
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"), resolve=True)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    if not rows:
        raise ValueError(f"{directory}: no step was finished")
    return Run(workload_of(config, name=directory.name), read_trace(directory / "trace.json"), rows)


Points = dict[str, list[tuple[float, float]]]  # cost -> (rows or samples, ms)


def host_points(run: Run) -> Points:
    """What one run shows of each cost: medians by size, ms."""
    found: Points = {}
    for name, points in _points(run).items():
        by_size: dict[float, list[float]] = defaultdict(list)
        for size, ms in points:
            by_size[size].append(ms)
        found[name] = [(round(size, 1), round(statistics.median(values), 3)) for size, values in by_size.items()]
    return found


def host_costs(runs: Sequence[Points]) -> HostCosts:
    """The costs that runs show together: lines through the points, or the median where nothing depends on a size.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("no runs: host costs are read from the spans of at least one")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        for name, points in run.items():
            found[name] += [(float(size), float(ms)) for size, ms in points]
    costs: dict[str, float] = {}
    for name, per in _AFFINE.items():
        costs[name], costs[per] = line(found.pop(name, []))
    for name, points in found.items():
        costs[name] = max(0.0, statistics.median(ms for _, ms in points))
    return HostCosts(**{name: round(value, 3) for name, value in costs.items()})


_AFFINE = {
    "request_ms": "request_ms_per_row",
    "prepare_ms": "prepare_ms_per_sample",
    "update_ms": "update_ms_per_sample",
}


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Base and slope, neither negative, of the least-squares line; a constant where there is one size alone."""
    import numpy as np

    if not points:
        return 0.0, 0.0
    x, y = np.array(points, float).T
    if len(set(x)) > 1:
        slope, base = np.polyfit(x, y, 1)
        if base < 0:
            slope, base = float((x * y).sum() / (x * x).sum()), 0.0
        if slope >= 0:
            return float(base), float(slope)
    return max(0.0, float(np.median(y))), 0.0


def _points(run: Run) -> Points:
    work, samples, found = run.work, run.samples(), defaultdict[str, list[tuple[float, float]]](list)
    batches = run.spans("policy", "inference", "batch")
    found["batch_ms"] = [(0, b.ms - work.policy.inference_ms(b.args["size"])) for b in batches]
    if work.layout.replicas == 1:
        found["request_ms"] = _requests(run, batches)
    found["deliver_ms"] = _deliveries(run)
    pieces = run.spans("driver", "step", "advantages")
    steps = max(1, len(run.spans("driver", "publication", "publish")))
    found["prepare_ms"] = [(samples * steps / len(pieces), p.ms) for p in pieces]
    for row in run.rows[_STEADY:]:
        if "timing_s/parity" in row:
            rows = -(-min(32, samples) // work.layout.ranks)
            forward = work.policy.forward_share * work.policy.train_ms(rows)
            found["parity_ms"].append((0, 1e3 * row["timing_s/parity"] - forward))
    sync_ms = work.policy.sync_ms
    found["publish_ms"] = [(0, s.ms - sync_ms) for s in run.spans("driver", "publication", "publish")]
    found["snapshot_ms"] = [(0, s.ms) for s in run.spans("actor", "gradient", "snapshot")]
    found["micro_ms"] = [
        (0, s.ms - work.policy.train_ms(s.args["samples"])) for s in run.spans("actor", "gradient", "micro_batch")
    ]
    _updates(run, found)
    _between_steps(run, found)
    return {name: points for name, points in found.items() if points}


def _requests(run: Run, batches: list[Span]) -> list[tuple[float, float]]:
    """(rows, way there and back) of calls that found the replica idle."""
    ends = sorted(b.end for b in batches)
    by_start = sorted(batches)
    starts = [b.start for b in by_start]
    found = []
    for call in run.spans("env", "shard", "wait:batch"):
        i = bisect.bisect_left(starts, call.start)
        if i == len(starts) or by_start[i].end > call.end or bisect.bisect_right(ends, call.start) < i:
            continue  # it was answered by a later batch, or another one was running when it came
        if by_start[i].args["size"] == call.args["requests"]:
            found.append((float(call.args["requests"]), call.ms - by_start[i].ms))
    return found


def _deliveries(run: Run) -> list[tuple[float, float]]:
    """ms an episode: the pause between the answer that brings its last value and what the loop does next."""
    found = []
    for (process, lane), spans in run.lanes.items():
        if not (process.startswith("env") and lane.startswith("shard")):
            continue
        order = sorted((s, name) for name, lane_spans in spans.items() for s in lane_spans if s.start >= run.steady)
        for (before, what), (after, then) in zip(order, order[1:], strict=False):
            pause = after.start - before.end
            if what != "wait:batch" or pause < _DELIVERY_MS or "requests" not in before.args:
                continue
            stayed = after.args.get("envs", 0) if then == "chunk_step" else 0
            if before.args["requests"] > stayed:
                found.append((0.0, pause / (before.args["requests"] - stayed)))
    return found


def _updates(run: Run, found: dict[str, list[tuple[float, float]]]) -> None:
    """Of whole batches: what the driver's call takes beside the learner's work, and that beside the network."""
    work, samples = run.work, run.samples()
    inside = run.spans("actor0", "gradient", "update")
    for call in run.spans("driver", "step", "update"):
        there = [s for s in inside if call.start <= s.start and s.end <= call.end + 1]
        if there:
            found["update_ms"].append((samples, call.ms - sum(s.ms for s in there)))
    size = work.schedule.micro_batch
    for s in inside:
        micro = -(-s.args["samples"] // size)
        nominal = micro * work.policy.train_ms_base + s.args["samples"] * work.policy.train_ms_per_sample
        if work.schedule.epochs == 1 and not work.schedule.training:
            found["micro_ms"].append((0, (s.ms - nominal) / micro))


def _between_steps(run: Run, found: dict[str, list[tuple[float, float]]]) -> None:
    """From the end of a publication that the driver waited for to its next look for groups, and what came of it."""
    if run.work.schedule.training:
        return
    waits = run.spans("driver", "step", "wait:data")
    idle = run.spans("env", "shard", "wait:data")
    for published in run.spans("driver", "publication", "publish"):
        following = [w for w in waits if w.start >= published.end]
        if not following:
            continue
        begin = following[0].start
        found["step_ms"].append((0, begin - published.end))
        begun = [s.end for s in idle if s.start <= begin <= s.end + 5 and s.end - begin < 1000]
        if begun:
            found["assign_ms"].append((0, max(0.0, min(begun) - begin)))
    if run.work.schedule.streaming:
        pieces = [p.end for p in run.spans("driver", "step", "advantages")]
        previous = 0.0
        for micro in run.spans("actor0", "gradient", "micro_batch"):
            i = bisect.bisect_right(pieces, micro.start)
            if i and pieces[i - 1] >= previous:  # the learner was idle when the samples were ready
                found["fetch_ms"].append((0, micro.start - pieces[i - 1]))
            previous = micro.end


def to_json(costs: HostCosts) -> dict[str, float]:
    return {f.name: getattr(costs, f.name) for f in fields(costs)}
