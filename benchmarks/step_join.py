"""``step_join`` against ``run_to_completion``: one inference lane with its real batcher, one process.

    python benchmarks/step_join.py --num-steps 16 --json out.json      # the embedded pi0-nano policy, nothing emulated
    python benchmarks/step_join.py --num-steps 10 --emulate 5 0.5 12 0.05

``--emulate`` puts the policy that only takes time in its place: its four numbers are ms of a batch's prefix, of each
row's, of a denoising step, and of each row in it. Those above stand for an accelerator, where a step costs about the
same whatever the batch and denoising dominates; on a CPU a row's prefix costs as much as its share of all the steps.

Three views, each with both ways of batching in turn on the same arrivals; figures are medians over the repeats:

saturated    twice as many requests as fit a batch are always on their way: the lane's capacity in chunks a second.
open loop    Poisson arrivals at a fraction of the capacity of ``run_to_completion``: equal throughput, so what differs
             is the time from a request's arrival to its start (wait) and to its answer (latency).
closed loop  environments that each think (lognormal) after every answer: a shorter latency becomes more chunks.

Observations are random: the cost of a chunk does not depend on what is in the picture.
"""

from __future__ import annotations

import argparse
import heapq
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla3_plugin.contract import Observation
from vla3_plugin.policies.base import VLAPolicy
from vla3_plugin.policies.latency import LatencyPolicy, LatencySettings
from vla3_plugin.policies.registry import load_policy
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.batcher import Batcher, Ticket
from vla3_plugin.rollout.denoising import make_runner

Row = dict[str, np.ndarray]
BATCHING = ("run_to_completion", "step_join")


@dataclass
class Result:
    view: str
    batching: str
    load: float  # requests a second offered (open loop), environments (closed loop), requests kept waiting (saturated)
    chunks_per_s: float
    wait_p50_ms: float  # arrival to the begin of its chain
    wait_p95_ms: float
    latency_p50_ms: float  # arrival to answer
    latency_p95_ms: float
    occupancy: float  # requests in a forward of the expert


class Lane:
    """A policy behind a batcher, served by a thread of its own until ``close``."""

    def __init__(self, served: ServedPolicy, batching: str, max_batch_size: int, max_wait_ms: float) -> None:
        self.batcher = Batcher(max_batch_size, max_wait_ms)
        self.runner = make_runner(batching, served, self.batcher, max_batch_size)
        self.open = True
        self.thread = threading.Thread(target=self._run, name="inference")
        self.thread.start()

    def _run(self) -> None:
        while self.open or self.runner.running or self.batcher.depth:
            self.runner.run_once(timeout=0.05)

    def close(self) -> None:
        self.open = False
        self.thread.join()


@dataclass
class Requests:
    """Submits prepared rows and notes when each was answered."""

    lane: Lane
    rows: list[Row]
    sent: list[Ticket] = field(default_factory=list)
    answered_at: dict[int, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def send(self) -> None:
        number = len(self.sent)
        ticket = self.lane.batcher.submit([(self.rows[number % len(self.rows)], (0, number, 0))], "train")[0]
        self.sent.append(ticket)
        ticket.future.add_done_callback(lambda _: self._note(number))

    def _note(self, number: int) -> None:
        with self.changed:
            self.answered_at[number] = time.monotonic()
            self.changed.notify()

    def finish(self, view: str, batching: str, load: float, start: float, end: float) -> Result:
        """Chunks answered in [start, end), times of the requests that arrived in it, whenever they were answered."""
        self.lane.close()
        for ticket in self.sent:
            ticket.future.result(timeout=0)  # a failed request must not pass for a fast one
        answered = sum(start <= at < end for at in self.answered_at.values())
        latency = [
            (self.answered_at[number] - ticket.arrival) * 1e3
            for number, ticket in enumerate(self.sent)
            if start <= ticket.arrival < end
        ]
        stats, runner = self.lane.batcher.drain_stats(), self.lane.runner
        times = [*np.percentile(stats.waits_ms, (50, 95)), *np.percentile(latency, (50, 95))]
        return Result(view, batching, load, answered / (end - start), *map(float, times), runner.rows / runner.steps)


def open_loop(requests: Requests, gaps: Iterator[float], seconds: float) -> tuple[float, float]:
    start = due = time.monotonic()
    while (due := due + next(gaps)) < start + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        requests.send()
    return start + 0.2 * seconds, start + seconds  # without filling up


def saturated(requests: Requests, depth: int, seconds: float) -> tuple[float, float]:
    start = time.monotonic()
    with requests.changed:
        while time.monotonic() < start + seconds:
            while len(requests.sent) - len(requests.answered_at) < depth:
                requests.send()
            requests.changed.wait(0.5)
    return start + 0.2 * seconds, start + seconds  # without filling up


def closed_loop(requests: Requests, thinks: Iterator[float], environments: int, seconds: float) -> tuple[float, float]:
    start = time.monotonic()
    ready = [start + next(thinks) for _ in range(environments)]  # when environments have thought
    heapq.heapify(ready)
    seen = 0
    while (now := time.monotonic()) < start + seconds:
        while ready and ready[0] <= now:
            heapq.heappop(ready)
            requests.send()
        with requests.changed:
            if len(requests.answered_at) == seen:
                requests.changed.wait(ready[0] - now if ready else 0.5)
            answered = len(requests.answered_at)
        for _ in range(answered - seen):
            heapq.heappush(ready, time.monotonic() + next(thinks))
        seen = answered
    return start + 0.2 * seconds, start + seconds


def observations(policy: VLAPolicy, number: int) -> list[Row]:
    rng, record = np.random.default_rng(0), policy.processing
    shown = [
        Observation(
            {name: rng.integers(0, 256, (*record.image_size, 3), dtype=np.uint8) for name in record.cameras},
            rng.normal(size=record.state_dim).astype(np.float32),
            "pick up the red cube",
        )
        for _ in range(number)
    ]
    inputs = {name: tensor.numpy() for name, tensor in policy.prepare(shown).items()}
    return [{name: array[i] for name, array in inputs.items()} for i in range(number)]


def step_costs(served: ServedPolicy, rows: list[Row], sizes: tuple[int, ...]) -> dict[int, list[float]]:
    """ms of encoding a batch and of one denoising step, the fastest of five: what the comparison rests on."""
    costs = {}
    for size in sizes:
        inputs = {name: np.stack([row[name] for row in rows[:size]]) for name in rows[0]}
        encode, step = [], []
        for _ in range(5):
            begun = time.perf_counter()
            chains = served.begin(inputs, [(0, i, 0) for i in range(size)], "train")
            encoded = time.perf_counter()
            served.denoise(chains)
            encode.append((encoded - begun) * 1e3)
            step.append((time.perf_counter() - encoded) * 1e3)
        costs[size] = [round(min(encode), 2), round(min(step), 2)]
    return costs


def measure(
    served: ServedPolicy, rows: list[Row], view: str, batching: str, load: float, args: Any, seed: int
) -> Result:
    rng = np.random.default_rng(seed)  # the same arrivals for both ways of batching
    requests = Requests(Lane(served, batching, args.max_batch_size, args.max_wait_ms), rows)
    if view == "saturated":
        start, end = saturated(requests, int(load), args.seconds)
    elif view == "open loop":
        start, end = open_loop(requests, (rng.exponential(1 / load) for _ in count()), args.seconds)
    else:
        thinks = (args.think_ms / 1e3 * rng.lognormal(sigma=0.5) for _ in count())
        start, end = closed_loop(requests, thinks, int(load), args.seconds)
    return requests.finish(view, batching, load, start, end)


def compare(served: ServedPolicy, rows: list[Row], view: str, load: float, args: Any) -> list[Result]:
    """Medians of both ways, which take turns so that a machine that slows down slows both."""
    pair: list[list[Result]] = [[], []]
    for repeat in range(args.repeats):
        for i in (0, 1) if repeat % 2 == 0 else (1, 0):
            pair[i].append(measure(served, rows, view, BATCHING[i], load, args, args.seed + repeat))
    medians = []
    for results in pair:
        first = results[0]
        figures = {
            f.name: float(np.median([getattr(r, f.name) for r in results])) for f in fields(Result) if f.type == "float"
        }
        medians.append(replace(first, **figures))
        r = medians[-1]
        print(
            f"{r.view:12}{r.batching:18}{r.load:9.1f}{r.chunks_per_s:9.1f}{r.wait_p50_ms:10.1f}{r.wait_p95_ms:10.1f}"
            f"{r.latency_p50_ms:10.1f}{r.latency_p95_ms:10.1f}{r.occupancy:9.1f}",
            flush=True,
        )
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="pi0-nano-maniskill")
    parser.add_argument("--emulate", type=float, nargs=4, metavar="MS", help="prefix, per row, step, per row")
    parser.add_argument("--num-steps", type=int, default=16, help="denoising steps K")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--max-wait-ms", type=float, default=2.0)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.4, 0.7], help="fractions of the capacity")
    parser.add_argument("--environments", type=int, nargs="*", default=[12])
    parser.add_argument("--think-ms", type=float, default=100.0, help="median time between answer and next request")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.emulate:
        prefix, prefix_row, step, step_row = args.emulate
        policy: VLAPolicy = LatencyPolicy(
            LatencySettings(
                denoising_steps=args.num_steps, prefix_ms_base=prefix, prefix_ms_per_sample=prefix_row,
                step_ms_base=step, step_ms_per_sample=step_row,
            )
        )  # fmt: skip
        rows = [{"state": np.zeros(policy.settings.state_dim, np.float32)}] * 64
    else:
        policy = load_policy(args.policy, num_steps=args.num_steps)
        rows = observations(policy, 64)
    served = ServedPolicy(policy)
    costs = step_costs(served, rows, (1, 4, args.max_batch_size))
    name = f"emulated {args.emulate}" if args.emulate else args.policy
    print(f"{name}, K = {args.num_steps}, batches of at most {args.max_batch_size}")
    for size, (encode, step) in costs.items():
        print(f"  a batch of {size}: {encode} ms to encode, {step} ms a denoising step")
    heads = ("load", "chunks/s", "wait p50", "p95 (ms)", "latency", "p95 (ms)", "in step")
    print(
        f"{'view':12}{'batching':18}"
        + "".join(f"{h:>{w}}" for h, w in zip(heads, (9, 9, 10, 10, 10, 10, 9), strict=True))
    )
    results = compare(served, rows, "saturated", 2 * args.max_batch_size, args)
    capacity = results[0].chunks_per_s
    for fraction in args.loads:
        results += compare(served, rows, "open loop", fraction * capacity, args)
    for environments in args.environments:
        results += compare(served, rows, "closed loop", environments, args)
    if args.json:
        found = {"settings": vars(args), "costs_ms": costs, "results": [asdict(r) for r in results]}
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
