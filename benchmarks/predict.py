"""Predicted against measured throughput of whole runs on the emulator, and the table of it: benchmarks/prediction.md.

    python benchmarks/predict.py record RUNS --out benchmarks/profiles/emulator.json   # RUNS/PRESET/MODE of
                                                                                       # async_throughput.py --out
    python benchmarks/predict.py table benchmarks/profiles/emulator.json > benchmarks/prediction.md

``record`` keeps of each run its measured figures, what of its config the prediction needs, and what its spans say of
the host's own costs. ``table`` predicts each run with the host costs of the runs of the *other* presets, so that no
figure is predicted from itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_throughput import figures
from omegaconf import OmegaConf

from vla3_plugin.placement.closed_forms import bounds, d_vla, t_1
from vla3_plugin.placement.profile_host import host_costs, host_points, read_run
from vla3_plugin.placement.simulate import Prediction, simulate
from vla3_plugin.placement.simulate_model import HostCosts, Workload, workload_of

NEEDED = {  # what ``workload_of`` reads
    "vla3": ("seed", "env", "stages", "algorithm"),
    "trainer": ("n_gpus_per_node", "nnodes"),
    "data": ("train_batch_size",),
}


def record(root: Path) -> list[dict[str, Any]]:
    """An entry a run below ``root``, in the order of their names."""
    entries = []
    for path in sorted(root.glob("*/*/config.yaml")):
        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((path.parents[1] / "result.json").read_text())
        measured = {m["mode"].replace("+", "_"): m for m in result["modes"]}[path.parent.name]
        kept: dict[str, Any] = {part: {k: config[part][k] for k in keys} for part, keys in NEEDED.items()}
        roles = config["actor_rollout_ref"]
        kept["actor_rollout_ref"] = {
            "model": {k: roles["model"][k] for k in ("path", "options")},
            "rollout": {k: roles["rollout"][k] for k in ("n_gpus_per_node", "nnodes")},
            "actor": {"ppo_micro_batch_size_per_gpu": roles["actor"]["ppo_micro_batch_size_per_gpu"]},
        }
        cooldown = measured.get("cooldown", 0)
        steady = figures(rows, len(rows) - measured["steps"] - cooldown, cooldown)
        mode = path.parent.name.replace("all_", "all+").replace("interaction_", "interaction+")
        entries.append({
            "preset": path.parents[1].name, "mode": mode, "config": kept,
            "measured": steady, "host": host_points(read_run(path.parent)),
        })  # fmt: skip
    return entries


def predict(entries: list[dict[str, Any]], steps: int) -> list[tuple[dict[str, Any], Prediction, Workload]]:
    found = []
    for entry in entries:
        others = [e["host"] for e in entries if e["preset"] != entry["preset"]]
        work = workload_of(entry["config"], host_costs(others), f"{entry['preset']} {entry['mode']}")
        if entry["mode"] == "sync_collocated":  # one device is both; on one clock they never meet
            work = work.but(shared=True)
        found.append((entry, simulate(work, steps=steps), work))
    return found


def table(entries: list[dict[str, Any]], steps: int) -> str:
    lines = [
        "| workload, mode | measured | predicted | difference | no host costs | closed form | busiest, predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    gaps, best = [], []
    found = predict(entries, steps)
    for entry, prediction, work in found:
        measured = entry["measured"]["samples_per_s"]
        gap = prediction.samples_per_s / measured - 1
        gaps.append(gap)
        bare = simulate(replace(work, host=HostCosts()), steps=steps).samples_per_s
        form = min(min(bounds(work).values()), (d_vla if work.schedule.training else t_1)(work).samples_per_s)
        mark = "**" if abs(gap) > 0.1 else ""
        lines.append(
            f"| {entry['preset']}, {entry['mode']} | {measured:.1f} | {prediction.samples_per_s:.1f} | "
            f"{mark}{100 * gap:+.1f}%{mark} | {bare:.1f} | {form:.1f} | {prediction.limiting} "
            f"{100 * prediction.busy[prediction.limiting]:.0f}% |"
        )
    for preset in sorted({entry["preset"] for entry in entries}):
        mine = [
            (e["measured"]["samples_per_s"], p.samples_per_s, e["mode"]) for e, p, _ in found if e["preset"] == preset
        ]
        chosen = max(mine, key=lambda row: row[1])
        best.append(f"{preset}: {chosen[2]}, {100 * (chosen[0] / max(m for m, _, _ in mine) - 1):+.1f}%")
    within = sum(abs(gap) <= 0.1 for gap in gaps)
    lines += [
        "",
        f"Within 10%: {within} of {len(gaps)}; mean absolute difference "
        f"{100 * statistics.mean(abs(gap) for gap in gaps):.1f}%, mean {100 * statistics.mean(gaps):+.1f}%.",
        "",
        "The mode that the prediction ranks first, and what it measured against the best measured one: "
        + "; ".join(best) + ".",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    recording = commands.add_parser("record")
    recording.add_argument("runs", type=Path)
    recording.add_argument("--out", type=Path, required=True)
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    showing.add_argument("--steps", type=int, default=24, help="simulated, after 3")
    args = parser.parse_args()
    if args.command == "record":
        args.out.write_text(json.dumps(record(args.runs), indent=None, separators=(",", ":")) + "\n")
    else:
        print(table(json.loads(args.file.read_text()), args.steps))


if __name__ == "__main__":
    main()
