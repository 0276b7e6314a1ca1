"""Does the data plane hold the weight plane up?  ``python benchmarks/planes.py [--steps 12] [--override ...]``

Three whole runs on the emulator, all stages on, real processes, queues and weight sync. In the first a chunk step takes
long, and the data plane is all but idle. In the last nothing holds it back: large images go from simulators to the
policy and, with everything else, to the store and the learner, as fast as this machine can. The one between tells what
data adds from what a busy policy worker adds: chunk steps take no time either, but images are 4 pixels wide.
What is compared is ``timing_s/publish``: from the moment a version is to be sent until every policy worker serves it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARMUP = 2  # steps; the first publication sends what training does not change as well
STATE, ACTION = 2_000, 180  # the emulator's policy is one linear layer to eight actions: 2.9 million parameters
COMMON = [
    "recipe=vla3_latency", "vla3/latency=fast-learner", "vla3/stages@_global_=asynchronous",
    "vla3.env.shards_per_worker=4", "vla3.env.options.episode_chunks=8", f"++vla3.env.options.state_dim={STATE}",
    f"++actor_rollout_ref.model.options.state_dim={STATE}", f"++vla3.env.options.action_dim={ACTION}",
    f"++actor_rollout_ref.model.options.action_dim={ACTION}", "++vla3.env.options.image_size=256",
    "++vla3.env.options.cameras=2", "data.train_batch_size=8", "actor_rollout_ref.model.options.sync_ms=0",
    "actor_rollout_ref.model.options.train_ms_per_sample=0", "vla3.stages.training.max_staleness=2",
]  # fmt: skip
LOADS = {
    "idle": ["vla3.env.options.chunk_ms=300"],
    "small images": ["vla3.env.options.chunk_ms=0", "++vla3.env.options.image_size=4"],
    "saturated": ["vla3.env.options.chunk_ms=0"],
}


def run(load: str, steps: int, overrides: list[str], directory: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "verl.trainer.main", *COMMON, *LOADS[load], f"vla3.run_dir={directory}",
        f"trainer.total_training_steps={WARMUP + steps}", *overrides,
    ]  # fmt: skip
    directory.mkdir(parents=True)
    with (directory / "log").open("w") as log:
        subprocess.run(command, cwd=directory, stdout=log, stderr=log, check=True)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][WARMUP:]
    seconds = rows[-1]["time"] - rows[0]["time"]
    carried = sum(v for row in rows[1:] for k, v in row.items() if k.startswith("traffic/data/"))
    times = sorted(row["timing_s/publish"] for row in rows if "timing_s/publish" in row)
    return {
        "load": load,
        "publish_ms": [round(1e3 * t) for t in times],
        "median_ms": 1e3 * statistics.median(times),
        "data_mb_per_s": carried / 2**20 / seconds,
        "step_s": seconds / (len(rows) - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run")
    parser.add_argument("--override", nargs="*", default=[], help="further Hydra overrides, in both runs")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="vla3-planes-"))
    found = [run(load, args.steps, args.override, out / load.replace(" ", "-")) for load in LOADS]
    for row in found:
        print(f"{row['load']:10} {row['data_mb_per_s']:8.1f} MB/s of data, a step {row['step_s']:6.2f} s, "
              f"publication {row['median_ms']:6.0f} ms in the median of {row['publish_ms']}")  # fmt: skip
    for other in found[:-1]:
        ratio = found[-1]["median_ms"] / other["median_ms"]
        print(f"saturated over {other['load']}: {ratio:.2f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
