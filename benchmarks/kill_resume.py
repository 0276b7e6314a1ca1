"""Kill what a run cannot replace at random moments, let it restart each time, and compare the end with an
uninterrupted run.

    python benchmarks/kill_resume.py --kills 20 --json
    python benchmarks/kill_resume.py --kills 20 --asynchronous --json

Synchronous: the exported policy after the last step must be the uninterrupted run's, value for value. Asynchronous: the
ledger must hold every group of the plan once, apart from those that stand for replay. SIGKILL goes to the driver, the
trainer or a learner rank, at a time drawn uniformly after the run's (re)start; the simulator is real, and built
anew for each episode, without which its episodes depend on those before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from chaos import account
from safetensors.torch import load_file
from soak import TAG, end_with_me, processes

SMALL = [
    "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=1", "data.train_batch_size=8",
    "vla3.env.shards_per_worker=2", "vla3.env.envs_per_shard=2", "vla3.algorithm.num_mini_batches=2",
    "vla3.algorithm.update_epoch=1", "actor_rollout_ref.model.cpu_threads=1", "+vla3.env.options.reconfigure=true",
]  # fmt: skip


def start(directory: Path, asynchronous: bool, steps: int, *overrides: str) -> subprocess.Popen:
    recipe = "vla3_maniskill" if asynchronous else "vla3_maniskill_sync"
    command = [sys.executable, "-m", "verl.trainer.main", f"recipe={recipe}", f"vla3.run_dir={directory}", *SMALL,
               f"trainer.total_training_steps={steps}", *overrides]  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    log = (directory / "log").open("a")
    run = subprocess.Popen(
        command, cwd=directory, stdout=log, stderr=log, env={**os.environ, "VLA3_PROFILE": "cpu", TAG: str(os.getpid())}
    )
    return end_with_me(run)


def kill_at_random(run: subprocess.Popen, kills: int, longest_s: float, rng: random.Random) -> dict[str, int]:
    """SIGKILL up to ``kills`` processes, each of a life of its own; how many of each kind."""
    done: dict[str, int] = {}
    while sum(done.values()) < kills and run.poll() is None:
        time.sleep(rng.uniform(1.0, longest_s))
        try:
            found = {"driver": psutil.Process(run.pid).children()}
        except psutil.Error:
            break
        for process in processes(str(os.getpid())):
            for name, title in (("trainer", "ray::TaskRunner"), ("learner", "ray::WorkerDict")):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    found[name] = [process]
        name = rng.choice(sorted(found))
        if found[name]:
            found[name][0].send_signal(signal.SIGKILL)
            done[name] = done.get(name, 0) + 1
            gone = found["driver"]
            psutil.wait_procs(gone, timeout=60)  # the supervisor ends what is left and starts anew
            time.sleep(6.0)
    return done


def difference(one: Path, other: Path, step: int) -> float:
    """Largest difference between two exported policies."""
    name = Path("checkpoints") / f"global_step_{step}" / "policy" / "model.safetensors"
    a, b = load_file(one / name), load_file(other / name)
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--longest", type=float, default=90.0, help="seconds after a start within which it is killed")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="vla3-kill-"))
    killed = root / "killed"
    run = start(killed, args.asynchronous, args.steps, f"vla3.max_restarts={args.kills + 2}")
    began = time.monotonic()
    count = kill_at_random(run, args.kills, args.longest, random.Random(args.seed))
    status = run.wait()
    report: dict[str, Any] = {
        "kills": count,
        "status": status,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "resumed": (killed / "log").read_text().count("vla3: resumed from"),
        **account(killed),
        "directory": str(root),
    }
    if not args.asynchronous:
        whole = root / "whole"
        report["uninterrupted_status"] = start(whole, False, args.steps).wait()
        report["largest_difference"] = difference(killed, whole, args.steps)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
