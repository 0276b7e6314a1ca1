"""The batcher alone, with a policy that does nothing, on one core: ``python benchmarks/batcher.py [--json]``.

Three questions. How many requests a second does it pass on? Below saturation, how long after the moment at which a
batch may fire does ``take`` return? Idle, how early or late does it fire against ``max_wait_ms``?

Times count from before ``submit`` is called, so that waiting for the lock or the interpreter is in them. Other jobs on
the machine disturb all three. A trial therefore takes the core that was idlest just before, and is *quiet* when others
used less than ``QUIET`` of it; trials are repeated until enough are quiet (or patience ends), all are reported, and the
verdict is the median of the quiet ones (of all, if none was). An idle request is *disturbed* when the kernel says that
the taker's thread was runnable for ``RUN_DELAY_MS`` without getting the core; a bare ``Condition.wait`` beside it shows
what the machine's timer does alone.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla3_plugin.rollout.batcher import Batcher

GOALS = {"requests_per_second": 5000, "p99_delay_ms": 2.0, "idle_late_ms": 1.0}
QUIET = 0.04  # share of the core that others may use
PATIENCE = 4  # times the wanted number of trials
RATES = (1000, 5000)  # requests a second, beside the shares of what this load saturates at
SHARES = (0.25, 0.5, 0.75)
SENDERS = {"one thread, as a policy worker's event loop": 1, "32 threads": 32}
RUN_DELAY_MS = 0.2
BATCH, WAIT_MS = 32, 2.0  # the defaults of vla3.stages.interaction
IDLE_WAIT_MS = 5.0


def busy_seconds() -> dict[int, float]:
    """Per core, how long it has been busy for anybody."""
    busy = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks[:8])
            busy[int(name[3:])] = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy


class Core:
    """Pins this thread, and those it starts from now on, to the idlest core; then counts what others use of it."""

    allowed = sorted(os.sched_getaffinity(0))

    def __init__(self) -> None:
        before = busy_seconds()
        time.sleep(0.1)
        after = busy_seconds()
        self.core = min(self.allowed, key=lambda core: after[core] - before[core])
        os.sched_setaffinity(0, {self.core})
        self.start()

    def start(self) -> None:
        self.busy, self.own, self.wall = busy_seconds()[self.core], time.process_time(), time.monotonic()

    def others(self) -> float:
        """Share of the core since ``start`` that went to other processes."""
        busy, own = busy_seconds()[self.core] - self.busy, time.process_time() - self.own
        return max(0.0, busy - own) / (time.monotonic() - self.wall)


def run_delay_ms() -> float:
    """Time for which this thread was runnable while another one had the core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


def start(target: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def serve(batcher: Batcher, seen: Callable[[list[Any], float], None] = lambda batch, now: None) -> None:
    """The inference lane of a policy that does nothing."""
    while not batcher.closed:
        batch = batcher.take()
        seen(batch, time.monotonic())
        for ticket in batch:
            ticket.future.set_result(None)


def finish(batcher: Batcher, threads: list[threading.Thread]) -> None:
    batcher.close(StopIteration("the trial is over"))
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------- requests a second


def ask_and_wait(batcher: Batcher) -> None:
    while not batcher.closed:
        (ticket,) = batcher.submit([None], "train")
        ticket.future.exception()


def ask(batcher: Batcher) -> None:
    while not batcher.closed:
        batcher.submit([None], "train")


def throughput(threads: int, body: Callable[[Batcher], None], batch: int, seconds: float) -> dict[str, Any]:
    core, batcher = Core(), Batcher(batch, WAIT_MS)
    running = [start(serve, batcher)] + [start(body, batcher) for _ in range(threads)]
    time.sleep(seconds / 10)
    batcher.drain_stats()
    core.start()
    wall, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    taken = batcher.drain_stats().taken
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    others = core.others()
    finish(batcher, running)
    return {"per_second": taken / wall, "per_cpu_second": taken / cpu, "others": others}


# ---------------------------------------------------------------- delay below saturation


def arrive(batcher: Batcher, rate: float, seed: int) -> None:
    """A Poisson stream of single requests."""
    draw = random.Random(seed)
    due = time.monotonic()
    while not batcher.closed:
        due += draw.expovariate(rate)
        time.sleep(max(0.0, due - time.monotonic()))
        batcher.submit([time.monotonic()], "train")


def delay(rate: float, threads: int, seconds: float) -> dict[str, Any]:
    core, batcher = Core(), Batcher(BATCH, WAIT_MS)
    delays: list[float] = []

    def seen(batch: list[Any], now: float) -> None:
        asked = [ticket.payload for ticket in batch]
        if asked:
            due = min(asked) + WAIT_MS / 1e3
            may_fire = min(due, max(asked)) if len(batch) == BATCH else due
            delays.extend([(now - may_fire) * 1e3] * len(batch))  # every request of a late batch was late

    core.start()
    running = [start(serve, batcher, seen)]
    running += [start(arrive, batcher, rate / threads, seed) for seed in range(threads)]
    time.sleep(seconds)
    others = core.others()
    finish(batcher, running)
    sizes = batcher.drain_stats().batch_sizes
    p50, p99 = np.percentile(delays, (50, 99)).tolist()
    found = {"rate": len(delays) / seconds, "batch": statistics.mean(sizes), "p50_ms": p50, "p99_ms": p99}
    return found | {"max_ms": max(delays), "requests": len(delays), "others": others}


# ---------------------------------------------------------------- idle


def idle(requests: int) -> list[dict[str, float]]:
    """Lone requests, each after the last was answered; and as many bare waits of the same length."""
    batcher, found = Batcher(BATCH, IDLE_WAIT_MS), []

    def lane() -> None:
        for _ in range(requests):
            before = run_delay_ms()
            (ticket,) = batcher.take()
            now = time.monotonic()
            late = {"late_ms": (now - ticket.payload) * 1e3 - IDLE_WAIT_MS}
            early = {"early": float((now - ticket.arrival) * 1e3 < IDLE_WAIT_MS)}
            found.append(late | early | {"run_delay_ms": run_delay_ms() - before})
            ticket.future.set_result(None)

    def bare() -> None:
        condition = threading.Condition()
        for i in range(requests):
            before, now = run_delay_ms(), time.monotonic()
            with condition:
                condition.wait(IDLE_WAIT_MS / 1e3)
            late = (time.monotonic() - now) * 1e3 - IDLE_WAIT_MS
            found[i] |= {"timer_ms": late, "timer_run_delay_ms": run_delay_ms() - before}

    Core()
    taker = start(lane)
    for _ in range(requests):
        time.sleep(0.001)  # the taker is asleep again, with nothing to wait for
        batcher.submit([time.monotonic()], "train")[0].future.result()
    taker.join()
    start(bare).join()
    return found


def summary(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"n": 0}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    late = sum(v > GOALS["idle_late_ms"] for v in values)
    return {"n": len(values), "min_ms": min(values), "p50_ms": p50, "p99_ms": p99, "max_ms": max(values), "late": late}


def idle_report(trials: list[list[dict[str, float]]]) -> dict[str, Any]:
    rows = [row for trial in trials for row in trial]
    report: dict[str, Any] = {"requests": len(rows), "early": int(sum(row["early"] for row in rows))}
    for name, key, disturbed in (("batcher", "late_ms", "run_delay_ms"), ("timer", "timer_ms", "timer_run_delay_ms")):
        report[name] = {
            "all": summary([row[key] for row in rows]),
            "undisturbed": summary([row[key] for row in rows if row[disturbed] < RUN_DELAY_MS]),
        }
    return report


# ---------------------------------------------------------------- all of it


def repeat(trial: Callable[[], dict[str, Any]], wanted: int) -> dict[str, Any]:
    """All trials by column, how many were quiet, and the medians over the quiet ones."""
    trials: list[dict[str, Any]] = []
    quiet: list[dict[str, Any]] = []
    while len(quiet) < wanted and len(trials) < PATIENCE * wanted:
        trials.append(trial())
        quiet += [t for t in trials[-1:] if t["others"] <= QUIET]
    columns: dict[str, Any] = {key: [round(t[key], 3) for t in trials] for key in trials[0]}
    median = {key: round(statistics.median(t[key] for t in quiet or trials), 3) for key in trials[0]}
    return columns | {"quiet_trials": len(quiet), "median": median}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    loads: list[tuple[str, int, Callable[[Batcher], None], int]] = [
        ("64 threads, each waits for its answer", 64, ask_and_wait, BATCH),
        ("1 thread that does not wait", 1, ask, BATCH),
        ("1 thread that waits, batches of one", 1, ask_and_wait, 1),
    ]
    rows = [
        {"load": load} | repeat(partial(throughput, threads, body, batch, args.seconds), args.trials)
        for load, threads, body, batch in loads
    ]
    return {
        "goals": GOALS,
        "settings": {"max_batch_size": BATCH, "max_wait_ms": WAIT_MS, "idle_max_wait_ms": IDLE_WAIT_MS},
        "throughput": rows,
        "delay": {senders: delays(threads, args) for senders, threads in SENDERS.items()},
        "idle": idle_report([idle(args.idle) for _ in range(args.trials)]),
    }


def delays(threads: int, args: argparse.Namespace) -> dict[str, Any]:
    # Asked for more than it can do, the same load says where it saturates: its own senders cost time too.
    saturation = repeat(partial(delay, 1e7, threads, args.seconds), args.trials)
    rates = [*RATES, *(round(share * saturation["median"]["rate"]) for share in SHARES)]
    trials = [{"asked": rate} | repeat(partial(delay, rate, threads, args.seconds), args.trials) for rate in rates]
    return {"saturation": saturation, "below": trials}


def verdict(result: dict[str, Any]) -> dict[str, bool]:
    late = result["idle"]["batcher"]["undisturbed"]
    return {
        "throughput": all(row["median"]["per_second"] >= GOALS["requests_per_second"] for row in result["throughput"]),
        **{
            f"delay, {senders}": all(row["median"]["p99_ms"] < GOALS["p99_delay_ms"] for row in found["below"])
            for senders, found in result["delay"].items()
        },
        "idle": result["idle"]["early"] == 0 and late["n"] > 0 and late["late"] == 0,
    }


def show(result: dict[str, Any]) -> None:
    def trials(row: dict[str, Any], key: str, form: str) -> str:
        return ", ".join(f"{v:{form}} ({o:.0%})" for v, o in zip(row[key], row["others"], strict=True))

    print("Median of the quiet trials [quiet of all: each trial (share of the core that others used)]")
    print("Requests a second on one core")
    for row in result["throughput"]:
        m, quiet = row["median"], row["quiet_trials"]
        print(f"  {row['load']:38s} {m['per_second']:7,.0f}/s, {m['per_cpu_second']:7,.0f} a CPU second", end="  ")
        print(f"[{quiet} of {len(row['others'])}: {trials(row, 'per_second', ',.0f')}]")
    print("Delay from the moment a batch may fire to the return of take()")
    for senders, found in result["delay"].items():
        saturated = found["saturation"]
        print(f"  {senders}, which without a pause saturate at {saturated['median']['rate']:,.0f}/s", end=" ")
        print(f"[{saturated['quiet_trials']} of {len(saturated['others'])} quiet]")
        for row in found["below"]:
            m, quiet = row["median"], row["quiet_trials"]
            print(f"    {m['rate']:7,.0f}/s, batches of {m['batch']:4.1f}: p50 {m['p50_ms']:.2f} ms,", end=" ")
            print(f"p99 {m['p99_ms']:.2f} ms  [{quiet} of {len(row['others'])}: {trials(row, 'p99_ms', '.2f')}]")
    idle, limit = result["idle"], GOALS["idle_late_ms"]
    print(f"Idle, lone requests against max_wait_ms = {IDLE_WAIT_MS:g}: {idle['early']} of {idle['requests']} early")
    for name in ("batcher", "timer"):
        for which, s in idle[name].items():
            if s["n"]:
                print(
                    f"  {name:8s} {which:12s} {s['n']:5d}: late by p50 {s['p50_ms']:.2f}, p99 {s['p99_ms']:.2f},",
                    end=" ",
                )
                print(f"max {s['max_ms']:.2f} ms; {s['late']} by more than {limit:g} ms")
    print("Goals:", ", ".join(f"{name} {'met' if met else 'MISSED'}" for name, met in result["met"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one trial")
    parser.add_argument("--trials", type=int, default=3, help="quiet trials wanted; up to four times as many are run")
    parser.add_argument("--idle", type=int, default=200, help="lone requests in one trial")
    args = parser.parse_args()
    result = measure(args)
    result["met"] = verdict(result)
    print(json.dumps(result, indent=2)) if args.json else show(result)


if __name__ == "__main__":
    main()
