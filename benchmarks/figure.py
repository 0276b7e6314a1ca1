"""Draws results of ``async_throughput.py``: ``python benchmarks/figure.py OUT/result.json … --out FILE.svg``.

One group of bars a workload, one bar a mode, as shares of the workload's bound. Results of one workload may come in
several files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

LABELS = {
    "sync_collocated": "synchronous, collocated",
    "sync": "synchronous, disaggregated",
    "pipeline": "two-stage pipeline",
    "interaction": "+ asynchronous interaction",
    "interaction+streaming": "+ streaming learner",
    "all": "+ decoupled training: all stages",
    "all+step_join": "all stages, step_join",
}


def gather(files: list[Path]) -> dict[str, dict[str, float]]:
    """Share of the bound by workload and mode; the last measurement of a mode counts."""
    found: dict[str, dict[str, float]] = {}
    for file in files:
        report: dict[str, Any] = json.loads(file.read_text())
        if not report["bound"]:
            raise SystemExit(f"{file}: {report['workload']} is a real simulator, whose bound is not known")
        for mode in report["modes"]:
            if mode["status"] == 0:
                share = mode["samples_per_s"] / report["bound"]["bound"]
                found.setdefault(report["workload"], {})[mode["mode"]] = share
    return found


def draw(shares: dict[str, dict[str, float]], out: Path) -> None:
    modes = [mode for mode in LABELS if any(mode in found for found in shares.values())]
    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        there = [(i, found[mode]) for i, found in enumerate(shares.values()) if mode in found]
        left = [i - 0.4 + (place + 0.5) * width for i, _ in there]
        color = plt.get_cmap("viridis")(place / max(1, len(modes) - 1))
        axes.bar(left, [share for _, share in there], width * 0.92, label=LABELS[mode], color=color)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(shares)), list(shares))
    axes.set_ylabel("share of the bound")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("throughput.svg"))
    args = parser.parse_args()
    draw(gather(args.results), args.out)


if __name__ == "__main__":
    main()
