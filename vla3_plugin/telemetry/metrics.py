"""The numbers of a run: how they are named, counted, bounded and written down.

A run directory holds ``metrics.jsonl`` (one object a step) and ``evaluations.jsonl`` (one object an evaluation). Both
are append-only and survive a kill at any byte: a record is one write of one line, and a torn last line is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.jsonl import JsonlWriter, MetricsError, read_jsonl

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

# Names that the console, the report and the trainer share. The rest follows verl: actor/, critic/, perf/, timing_s/.
SUCCESS_RATE = "env/success_rate"
EPISODES = "env/episodes"
RETURN = "env/return"  # /mean, /min, /max
EPISODE_LENGTH = "env/episode_length"  # control steps; /mean, /min, /max
ENV_STEPS = "env/steps_total"  # control steps since the run began
ENV_STEPS_PER_S = "env/steps_per_s"


# ---------------------------------------------------------------- success and its uncertainty


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a binomial proportion (Wilson 1927, eq. 4 of Brown, Cai and DasGupta 2001).

    centre = (p + z²/2n) / (1 + z²/n), half width = z/(1 + z²/n) · √(p(1−p)/n + z²/4n²), z the normal quantile.
    With no trials nothing is known: (0, 1).

    Raises:
        MetricsError: successes outside 0 to n, or confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise MetricsError(f"confidence is {confidence}, expected a number between 0 and 1, such as 0.95")
    if n < 0 or not 0 <= successes <= n:
        raise MetricsError(f"{successes} successes in {n} trials; expected 0 <= successes <= trials")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    shrink = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At the ends the bound is exactly 0 or 1; rounding must not push it inside the estimate.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def difference_interval(
    before: tuple[int, int], after: tuple[int, int], confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of (after − before) for two independent proportions given as (successes, n).

    Newcombe 1998, method 10: the Wilson bounds of both are combined as in a sum of squares. It holds for independent
    samples; two evaluations of the same episodes are usually positively correlated, and then it is too wide, not too
    narrow.
    """
    if before[1] == 0 or after[1] == 0:
        return -1.0, 1.0
    p, q = before[0] / before[1], after[0] / after[1]
    p_low, p_high = wilson_interval(*before, confidence)
    q_low, q_high = wilson_interval(*after, confidence)
    low = q - p - math.hypot(q - q_low, p_high - p)
    high = q - p + math.hypot(q_high - q, p - p_low)
    return max(-1.0, low), min(1.0, high)


class SuccessTable:
    """Successes and trials per task, in order of first appearance."""

    def __init__(self, counts: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.counts: dict[str, tuple[int, int]] = {}
        for task, (successes, n) in (counts or {}).items():
            self.add(task, successes, n)

    def add(self, task: str, successes: int | bool, n: int = 1) -> None:
        """Count ``successes`` of ``n`` further episodes of ``task``."""
        if n < 0 or not 0 <= int(successes) <= n:
            raise MetricsError(f"task {task!r}: {int(successes)} successes in {n} episodes")
        old = self.counts.get(task, (0, 0))
        self.counts[task] = (old[0] + int(successes), old[1] + int(n))

    @property
    def total(self) -> tuple[int, int]:
        """(successes, episodes) over all tasks."""
        return sum(s for s, _ in self.counts.values()), sum(n for _, n in self.counts.values())

    @property
    def rate(self) -> float:
        """Successes over episodes, NaN with no episode. Equal to the mean over tasks when each has the same number."""
        successes, n = self.total
        return successes / n if n else math.nan

    def interval(self, task: str | None = None, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson interval of one task, or of all episodes together."""
        return wilson_interval(*(self.total if task is None else self.counts[task]), confidence)

    def to_dict(self) -> dict[str, Any]:
        successes, n = self.total
        low, high = self.interval()
        return {
            "successes": successes,
            "n": n,
            "rate": successes / n if n else None,
            "low": low,
            "high": high,
            "tasks": [
                {"name": task, "successes": s, "n": k, "rate": s / k if k else None, "low": lo, "high": hi}
                for task, (s, k) in self.counts.items()
                for lo, hi in [wilson_interval(s, k)]
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SuccessTable:
        """The table of ``to_dict`` (only names and counts are read; rates and bounds are computed again)."""
        return cls({str(t["name"]): (int(t["successes"]), int(t["n"])) for t in data["tasks"]})

    def format(self) -> str:
        """A text table: task, successes/episodes, rate and its 95% interval; a last line for all tasks."""
        rows = [("task", "success", "rate", "95% interval")]
        counts = dict(self.counts)
        if len(counts) != 1:
            counts["all"] = self.total
        for task, (s, n) in counts.items():
            low, high = wilson_interval(s, n)
            rate = f"{100 * s / n:.1f}%" if n else "no episode"
            rows.append((task, f"{s}/{n}", rate, f"{100 * low:.1f} to {100 * high:.1f}%"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]:>{widths[3]}}".rstrip() for r in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join(lines)


@dataclass
class Evaluation:
    """Success of one policy version on assigned held-out episodes.

    ``mode``: ``ode`` is the noise-free policy, ``sde`` the noisy one that trains. ``started`` and ``ended``: Unix
    seconds. ``extra`` keeps further keys of the record (``env_steps``, ``elapsed_s``, a checkpoint's path).
    """

    step: int
    env: str
    mode: str
    table: SuccessTable
    started: float
    ended: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether its rate stands for the policy. What is left when episodes were lost to other versions does not: the
        ones that ended early are those that succeeded."""
        return self.table.total[1] > 0 and not self.extra.get("of_other_versions")

    def to_dict(self) -> dict[str, Any]:
        head = {"step": self.step, "env": self.env, "mode": self.mode}
        return {**head, **self.table.to_dict(), "started": self.started, "ended": self.ended, **self.extra}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        """Read a record; ``suite`` is accepted for ``env``.

        Raises:
            MetricsError: a key is missing or is not what it should be.
        """
        try:
            env = str(data["env"] if "env" in data else data["suite"])
            table, step = SuccessTable.from_dict(data), int(data["step"])
            started, ended = float(data["started"]), float(data["ended"])
        except (KeyError, TypeError, ValueError) as error:
            raise MetricsError(f"evaluation record without a usable {error}: {str(dict(data))[:200]}") from error
        derived = {"step", "env", "suite", "mode", "tasks", "successes", "n", "rate", "low", "high", "started", "ended"}
        extra = {k: v for k, v in data.items() if k not in derived}
        return cls(step, env, str(data.get("mode", "ode")), table, started, ended, extra)


def before_after(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """First and last evaluation of the noise-free policy (of the noisy one where there is no other) on one suite.

    None without two evaluations (with episodes) to compare. With several suites, the one evaluated first.
    """
    for mode in ("ode", "sde"):
        found = [e for e in evaluations if e.mode == mode and e.whole]
        found = [e for e in found if e.env == found[0].env]
        if len(found) >= 2:
            return found[0], found[-1]
    return None


# ---------------------------------------------------------------- aggregates


def aggregate(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """``name/mean``, ``name/min`` and ``name/max``; nothing for an empty list."""
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size == 0:
        return {}
    return {f"{name}/mean": float(data.mean()), f"{name}/min": float(data.min()), f"{name}/max": float(data.max())}


def histogram(name: str, values: Sequence[float] | np.ndarray, edges: Sequence[float]) -> dict[str, float]:
    """Counts as scalars, so that every logger takes them: ``name/hist/0_to_1`` counts 0 <= value < 1.

    Values outside the edges are counted in ``name/hist/below_…`` and ``name/hist/from_…``: counts add up to the number
    of values. NaN is refused.
    """
    data, bounds = np.asarray(values, dtype=np.float64).ravel(), np.asarray(edges, dtype=np.float64)
    if bounds.size < 2 or not (np.diff(bounds) > 0).all():
        raise MetricsError(f"{name}: histogram edges {list(edges)}, expected at least two, strictly increasing")
    if np.isnan(data).any():
        raise MetricsError(f"{name}: {int(np.isnan(data).sum())} of {data.size} values are NaN; filter them first")
    counts = {f"{name}/hist/below_{bounds[0]:g}": float((data < bounds[0]).sum())}
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        counts[f"{name}/hist/{low:g}_to_{high:g}"] = float(((data >= low) & (data < high)).sum())
    counts[f"{name}/hist/from_{bounds[-1]:g}"] = float((data >= bounds[-1]).sum())
    return counts


def episode_metrics(
    successes: Sequence[bool], returns: Sequence[float], lengths: Sequence[int], seconds: float | None = None
) -> dict[str, float]:
    """The ``env/`` metrics of the episodes that one step collected; ``seconds`` is how long collecting took."""
    metrics: dict[str, float] = {EPISODES: float(len(successes))}
    if len(successes):
        metrics[SUCCESS_RATE] = float(np.mean(np.asarray(successes, dtype=np.float64)))
    metrics |= aggregate(RETURN, returns) | aggregate(EPISODE_LENGTH, lengths)
    if seconds:
        metrics[ENV_STEPS_PER_S] = float(np.sum(lengths)) / seconds
    return metrics


# ---------------------------------------------------------------- files


class MetricsWriter:
    """Writes the steps and the evaluations of a run.

    ``elapsed_s`` of a record is the time that the run has worked, over all its processes: a resumed run goes on from
    its last record, and the pause between the two does not count.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        files = [self.run_dir / METRICS_FILE, self.run_dir / EVALUATIONS_FILE]
        earlier = [record.get("elapsed_s") for file in files for record in read_jsonl(file)]
        self._offset = max((float(e) for e in earlier if isinstance(e, (int, float))), default=0.0)
        self._opened = time.monotonic()
        self._metrics, self._evaluations = (JsonlWriter(file) for file in files)

    @property
    def elapsed_s(self) -> float:
        return self._offset + time.monotonic() - self._opened

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step."""
        self._metrics.append({"step": step, "time": clock.now(), "elapsed_s": self.elapsed_s, **metrics})

    def log_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append({**evaluation.to_dict(), "elapsed_s": self.elapsed_s})

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()


def _surviving(
    records: list[dict[str, Any]], key: Callable[[dict[str, Any]], Hashable] = lambda record: None
) -> list[dict[str, Any]]:
    """Drop what a resume took back: a record of step s replaces those of later steps, and of its own with equal key."""
    kept: list[dict[str, Any]] = []
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        beside: list[dict[str, Any]] = []
        while kept and kept[-1]["step"] >= step:
            last = kept.pop()
            if last["step"] == step and key(last) != key(record):
                beside.insert(0, last)
        kept += [*beside, record]
    return kept


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """One row a step, ascending; rows of steps that a resumed run did again are the later ones."""
    return _surviving(read_jsonl(Path(run_dir) / METRICS_FILE))


def read_evaluations(run_dir: Path | str) -> list[Evaluation]:
    """Evaluations in order of step; of the same step, suite and mode, the last one."""
    records = read_jsonl(Path(run_dir) / EVALUATIONS_FILE)
    kept = _surviving(records, lambda r: (r.get("env", r.get("suite")), r.get("mode", "ode")))
    return [Evaluation.from_dict(record) for record in kept]
