"""What each asynchronous stage gives: whole runs, one a mode, on an emulated workload or on a real simulator.

    python benchmarks/async_throughput.py --preset peer-reference --json
    python benchmarks/async_throughput.py --real maniskill --modes sync all

Every mode is a run of the ordinary entry with the stages switched; its figures are read from the run's own metrics.
Fresh samples (env chunk steps that were trained on for the first time) per second of wall clock, after the first steps
(warm-up) and before the last ones (in which simulators find nothing more to start): in a steady state that is also the
rate of env chunk steps. On a real simulator, how busy the cores were is told too: what they idle is all that another
schedule of the same work could gain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bound import bound, read

ON = {
    "interaction": "vla3.stages.interaction.enabled=true",
    "streaming": "vla3.stages.streaming.enabled=true",
    "training": "vla3.stages.training.enabled=true",
}
ONE_THREAD = "actor_rollout_ref.model.cpu_threads=1"  # as the asynchronous recipes have it
HOSTED = "vla3.env.host=policy_worker"
STEP_JOIN = "vla3.stages.interaction.batching=step_join"
MODES: dict[str, list[str]] = {
    "sync_collocated": ["collocated"],
    "sync": [],
    "pipeline": ["vla3.env.pipeline_stage_num=2"],
    "interaction": [ON["interaction"]],
    "interaction+streaming": [ON["interaction"], ON["streaming"]],
    "all": list(ON.values()),
    "all+step_join": [*ON.values(), STEP_JOIN],
    "all+hosted": [*ON.values(), HOSTED],
}
WORK = ("user", "nice", "system", "irq", "softirq", "steal")  # of psutil.cpu_times
# the same mathematics in every mode, so that only the schedule differs
COMMON = ["vla3.algorithm.advantage_statistics=previous", "vla3.algorithm.mini_batches=episodes"]


def overrides(mode: str, args: argparse.Namespace) -> list[str]:
    found = list(COMMON)
    for item in MODES[mode]:
        found += collocated(args) if item == "collocated" else [item]
    if args.real and set(ON.values()) & set(MODES[mode]):
        found.append(ONE_THREAD)
    return [*found, *args.override]


def recipe(args: argparse.Namespace) -> list[str]:
    """The workload on one clock; a mode turns stages on."""
    return [f"recipe=vla3_{args.real}_sync"] if args.real else ["recipe=vla3_latency", f"vla3/latency={args.preset}"]


def collocated(args: argparse.Namespace) -> list[str]:
    """Both roles on both of two emulated devices: two replicas and two learner ranks, each busy half of the time."""
    if args.real:
        raise SystemExit("sync_collocated: on one machine without devices every mode is collocated; leave it out")
    shards = read(args.preset).shards // 2
    return [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "vla3.env.workers=2",
        f"vla3.env.shards_per_worker={shards}",
    ]


class Cores:
    """How busy this machine's cores were, whoever used them: on a real simulator no schedule can use more than all."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []  # when, core seconds of work by then
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while True:
            times = psutil.cpu_times()  # those of guests are part of user and nice
            self.seen.append((time.time(), sum(getattr(times, name, 0.0) for name in WORK)))
            if self._over.wait(0.5):
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def busy(self, start: float, end: float) -> float:
        """Share of all cores' time between two moments, in seconds since the epoch."""
        when, work = zip(*self.seen, strict=True)
        done = np.interp([start, end], when, work)
        return float((done[1] - done[0]) / (end - start) / (os.cpu_count() or 1))


def run(mode: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "verl.trainer.main", *recipe(args), f"vla3.run_dir={directory}",
        f"trainer.total_training_steps={args.warmup + args.steps + args.cooldown}", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1", *overrides(mode, args),
    ]  # fmt: skip
    directory.mkdir(parents=True)
    cores = Cores()
    with (directory / "log").open("w") as log:
        status = subprocess.run(command, cwd=directory, stdout=log, stderr=log, check=False).returncode
    cores.close()
    if status != 0:
        tail = (directory / "log").read_text().strip().splitlines()[-5:]
        return {"mode": mode, "status": status, "error": "\n".join(tail)[-1500:]}
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    start, end = rows[args.warmup - 1]["time"], rows[-args.cooldown - 1]["time"]
    busy = {"cores_busy": cores.busy(start, end)}
    return {"mode": mode, "status": 0} | figures(rows, args.warmup, args.cooldown) | busy


def figures(rows: list[dict[str, Any]], warmup: int, cooldown: int) -> dict[str, Any]:
    """Rates from the end of step ``warmup`` to the end of the step before the last ``cooldown`` ones."""
    steady = rows[warmup : len(rows) - cooldown]
    seconds = steady[-1]["time"] - rows[warmup - 1]["time"]
    samples = sum(row["rollout/chunk_steps"] for row in steady)
    stale = [float(row.get("staleness/max", 0)) for row in steady]
    lanes = {
        name: sum(row.get(name, 0.0) for row in steady) / len(steady)
        for name in ("lanes/env/busy", "lanes/policy/busy", "lanes/actor/busy")
    }
    ages: dict[str, float] = {}
    for row in steady:
        for name, count in row.items():
            if name.startswith("staleness/") and name.rsplit("/", 1)[1].isdigit():
                ages[name] = ages.get(name, 0.0) + count
    return {
        "samples_per_s": samples / seconds,
        "step_s": seconds / len(steady),
        "steps": len(steady),
        "cooldown": cooldown,
        "staleness_max": max(stale),
        "staleness": {name.rsplit("/", 1)[1]: count for name, count in ages.items()},
        "dropped": sum(v for k, v in steady[-1].items() if k.startswith("rollout/dropped_")),
        **lanes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", help="a latency preset: a name in configs/latency")
    what.add_argument("--real", choices=("libero", "maniskill"))
    parser.add_argument("--modes", nargs="+", default=None, choices=MODES)
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--cooldown", type=int, default=3, help="steps after them: max_staleness + 1 or more")
    parser.add_argument("--override", nargs="*", default=[], help="further Hydra overrides, in every mode")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    modes = args.modes or [m for m in MODES if not (args.real and m == "sync_collocated")]
    out = args.out or Path(tempfile.mkdtemp(prefix="vla3-bench-"))
    limits = bound(args.preset) if args.preset else {}
    results = []
    for mode in modes:
        result = run(mode, args, out / mode.replace("+", "_"))
        results.append(result)
        if not args.json:
            print(line(result, results, limits), flush=True)
    report = {"workload": args.preset or args.real, "cores": os.cpu_count(), "bound": limits, "modes": results}
    if args.json:
        print(json.dumps(report, indent=1))
    (out / "result.json").write_text(json.dumps(report, indent=1))


def line(result: dict[str, Any], results: list[dict[str, Any]], limits: dict[str, Any]) -> str:
    if result["status"]:
        return f"{result['mode']:24} failed with status {result['status']}: {result['error']}"
    rate = result["samples_per_s"]
    first = results[0].get("samples_per_s", rate)
    text = f"{result['mode']:24} {rate:7.2f} samples/s {rate / first:5.2f} x the first, step {result['step_s']:6.2f} s"
    if limits:
        text += f", {rate / limits['bound']:.2f} of the bound"
    else:
        text += f", cores {result['cores_busy']:.0%} busy"
    return text + f", staleness at most {result['staleness_max']:.0f}"


if __name__ == "__main__":
    main()
