"""A long asynchronous run on the emulator, watched from outside: does anything grow, does it stop, is anything left?

    python benchmarks/soak.py --minutes 30 --json

Memory (proportional set size, so that shared pages count once), file descriptors, threads, shared-memory files and
samples in the store are read from /proc at intervals, for all processes of the run together. Growth is the slope of a
line through the second half of the readings, over that half's length; the first half is warm-up.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

TAG = "VLA3_SOAK"


def end_with_me(run: subprocess.Popen) -> subprocess.Popen:
    """A run that a benchmark started must not outlive it: it restarts by itself, for ever."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    atexit.register(lambda: run.poll() is None and run.terminate())
    return run


def processes(tag: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def reading(tag: str, parts: dict[str, list[float]]) -> dict[str, float]:
    """Totals over all processes; ``parts`` collects the memory of each, by process id and name."""
    total = {"processes": 0.0, "memory_mb": 0.0, "file_descriptors": 0.0, "threads": 0.0}
    for process in processes(tag):
        try:
            memory = process.memory_full_info().pss / 1e6
            total["memory_mb"] += memory
            parts.setdefault(f"{process.pid} {' '.join(process.cmdline())[:40].strip()}", []).append(memory)
            total["file_descriptors"] += process.num_fds()
            total["threads"] += process.num_threads()
            total["processes"] += 1
        except psutil.Error:
            continue
    total["shared_memory_files"] = float(len(list(Path("/dev/shm").iterdir())))
    return total


def growth(values: list[float]) -> float:
    """Change over the second half, from a line through it, as a share of its mean."""
    half = values[len(values) // 2 :]
    if len(half) < 3 or not any(half):
        return 0.0
    slope = statistics.linear_regression(range(len(half)), half).slope
    return slope * (len(half) - 1) / (sum(half) / len(half))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--preset", default="peer-reference")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between readings")
    parser.add_argument("--override", nargs="*", default=[], help="further Hydra overrides")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="vla3-soak-"))
    tag = str(os.getpid())
    command = [
        sys.executable, "-m", "verl.trainer.main", "recipe=vla3_latency", f"vla3/latency={args.preset}",
        "vla3/stages@_global_=asynchronous", f"vla3.run_dir={directory / 'run'}",
        "trainer.total_training_steps=1000000", *args.override,
    ]  # fmt: skip
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and passes that on
    before = float(len(list(Path("/dev/shm").iterdir())))
    with (directory / "log").open("w") as log:
        run = end_with_me(
            subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env={**os.environ, TAG: tag})
        )
        readings: list[dict[str, float]] = []
        parts: dict[str, list[float]] = {}
        end = time.monotonic() + args.minutes * 60
        while time.monotonic() < end and run.poll() is None:
            time.sleep(args.every)
            readings.append(reading(tag, parts))
        ended_early = run.poll() is not None
        asked = time.monotonic()
        run.send_signal(signal.SIGINT)
        try:
            run.wait(timeout=60)
        except subprocess.TimeoutExpired:
            run.kill()
        while processes(tag) and time.monotonic() - asked < 60:
            time.sleep(0.2)
        stopped_in = time.monotonic() - asked
    left = [p.cmdline()[:4] for p in processes(tag)]
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    report: dict[str, Any] = {
        "preset": args.preset,
        "minutes": args.minutes,
        "steps": len(rows),
        "samples": sum(row["rollout/chunk_steps"] for row in rows),
        "ended_early": ended_early,
        "growth": {name: round(growth([r[name] for r in readings]), 4) for name in readings[0]},
        "memory_growth_mb": {
            name: round(growth(values) * values[-1], 1)
            for name, values in sorted(parts.items(), key=lambda item: -growth(item[1]) * item[1][-1])[:6]
        },
        "first": readings[len(readings) // 2],
        "last": readings[-1],
        "queue_depth_max": [max((r.get("rollout/batcher/max_depth", 0.0) for r in part), default=0.0)
                            for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :])],
        "stopped_in_s": round(stopped_in, 1),
        "left_behind": left,
        "shared_memory_files_left": float(len(list(Path("/dev/shm").iterdir()))) - before,
        "directory": str(directory),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    for process in processes(tag):
        process.kill()


if __name__ == "__main__":
    main()
