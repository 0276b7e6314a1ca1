"""A run under fire: a random fault at a set rate, for as long as asked; then the account of every group.

    python benchmarks/chaos.py --minutes 30 --every 60 --json
    python benchmarks/chaos.py --real maniskill --minutes 15 --every 60 --json

Each fault sends SIGKILL or SIGSTOP to a process drawn at random: a simulator, an env worker, a policy worker, and with
``--whole-run`` the learner or the driver, after which the run restarts from its newest checkpoint. Reported: faults by
kind, the time until the run trained its next step after each, the load held (samples per second between faults against
the undisturbed first minute), and the account: groups trained twice, groups lost (both must be 0), processes and
shared-memory files left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from soak import TAG, end_with_me, processes

from vla3_plugin.telemetry.ledger import read_ledger

ROLES = {"simulator": "vla3_plugin.envs.child", "env worker": "ray::EnvWorker", "policy worker": "ray::PolicyWorker"}
WHOLE_RUN = {"learner": "ray::WorkerDict", "driver": "ray::TaskRunner"}


def rows(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # being written
            break
    return found


def strike(tag: str, roles: dict[str, str], rng: random.Random) -> dict[str, Any] | None:
    role = rng.choice(sorted(roles))
    victims = [p for p in processes(tag) if re.search(roles[role], " ".join(p.cmdline()))]
    if not victims:
        return None
    how = rng.choice([signal.SIGKILL, signal.SIGSTOP]) if role not in WHOLE_RUN else signal.SIGKILL
    victim = rng.choice(victims)
    try:
        victim.send_signal(how)
    except psutil.Error:
        return None
    return {"role": role, "signal": how.name, "at": time.time()}


def recipe_of(args: argparse.Namespace) -> list[str]:
    if args.real:
        return [f"recipe=vla3_{args.real}", "trainer.val_before_train=false", "trainer.test_freq=-1",
                "data.train_batch_size=16", "vla3.algorithm.num_mini_batches=2"]  # fmt: skip
    return ["recipe=vla3_latency", f"vla3/latency={args.preset}", "vla3/stages@_global_=asynchronous"]


def account(run_dir: Path) -> dict[str, Any]:
    """Groups by the ledger against the newest checkpoint's place in the plan."""
    checkpoints = sorted((run_dir / "checkpoints").glob("global_step_*"), key=lambda p: int(p.name.split("_")[-1]))
    step = int(checkpoints[-1].name.split("_")[-1])
    ledger = read_ledger(run_dir, last_step=step)
    admission = json.loads((checkpoints[-1] / "trainer.json").read_text())["admission"]
    lost = set(range(admission["next_group"])) - ledger.groups - set(admission["replay"])
    return {
        "steps": step,
        "groups_trained": sum(map(len, ledger.trained.values())),
        "groups_dropped": sum(map(len, ledger.dropped.values())),
        "groups_trained_twice": len(ledger.twice),
        "groups_lost": len(lost),
        "steps_missing": len(set(range(1, step + 1)) - set(ledger.trained)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between faults")
    parser.add_argument("--preset", default="peer-reference")
    parser.add_argument("--real", choices=["maniskill", "libero"])
    parser.add_argument("--whole-run", action="store_true", help="strike the learner and the driver too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--override", nargs="*", default=[], help="further Hydra overrides")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    directory, rng, tag = Path(tempfile.mkdtemp(prefix="vla3-chaos-")), random.Random(args.seed), str(os.getpid())
    run_dir = directory / "run"
    command = [
        sys.executable, "-m", "verl.trainer.main", *recipe_of(args), f"vla3.run_dir={run_dir}",
        "trainer.total_training_steps=1000000", "trainer.save_freq=10", "vla3.heartbeat_s=15", "vla3.worker_start_s=60",
        "vla3.env.timeout_s=20",
        "vla3.max_worker_restarts=1000", "vla3.max_restarts=1000", *args.override,
    ]  # fmt: skip
    roles = ROLES | (WHOLE_RUN if args.whole_run else {})
    shared = len(list(Path("/dev/shm").iterdir()))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and passes that on
    strikes: list[dict[str, Any]] = []
    with (directory / "log").open("w") as log:
        run = end_with_me(
            subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env={**os.environ, TAG: tag})
        )
        while len(rows(run_dir)) < 5 and run.poll() is None:
            time.sleep(1)
        begin = time.time()
        time.sleep(min(60.0, args.minutes * 15))  # undisturbed, to compare with
        quiet = time.time()
        end = begin + args.minutes * 60
        while time.time() < end and run.poll() is None:
            struck = strike(tag, roles, rng)
            if struck is not None:
                strikes.append(struck)
            time.sleep(min(rng.expovariate(1 / args.every) + 5, max(0.0, end - time.time())) + 1)
        survived = run.poll() is None
        asked = time.monotonic()
        run.send_signal(signal.SIGINT)
        try:
            run.wait(timeout=90)
        except subprocess.TimeoutExpired:
            run.kill()
        stopped_in = time.monotonic() - asked
    found = rows(run_dir)

    def rate(start: float, stop: float) -> float:
        return sum(r["rollout/chunk_steps"] for r in found if start <= r["time"] < stop) / max(stop - start, 1e-9)

    # the last strike may have come too late for another step
    after = [(s["at"], [r["time"] for r in found if r["time"] > s["at"] + 1]) for s in strikes]
    recovery = [times[0] - at for at, times in after if times]
    kinds: dict[str, int] = {}
    for struck in strikes:
        name = f"{struck['role']} {struck['signal']}"
        kinds[name] = kinds.get(name, 0) + 1
    report: dict[str, Any] = {
        "workload": args.real or args.preset,
        "minutes": args.minutes,
        "faults": kinds,
        "survived": survived,
        "samples_per_s_before": round(rate(begin, quiet), 2),
        "samples_per_s_under_fire": round(rate(quiet, end), 2),
        "seconds_to_next_step": {
            "median": round(statistics.median(recovery), 1) if recovery else None,
            "max": round(max(recovery), 1) if recovery else None,
        },
        **account(run_dir),
        "stopped_in_s": round(stopped_in, 1),
        "left_behind": [p.cmdline()[:4] for p in processes(tag)],
        "shared_memory_files_left": len(list(Path("/dev/shm").iterdir())) - shared,
        "directory": str(directory),
    }
    print(json.dumps(report, indent=1))
    for process in processes(tag):
        process.kill()


if __name__ == "__main__":
    main()
