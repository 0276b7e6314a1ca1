"""``report.html``: one page that says what a run did, from the files it left behind.

The page loads nothing from anywhere: style and charts are inline, videos are referred to beside it. Every piece is
optional; one that is missing is named as missing. Read from the run directory:

``metrics.jsonl``, ``evaluations.jsonl``  as ``telemetry.metrics`` writes them
``preflight.json``   the summary shown at the start (``console.format_preflight``): machine, policy, memory
``summary.json``     ``{"command", "status", "notes": [...], ...}``; ``machine`` too if preflight lacks it
``config.yaml``      the resolved configuration
``trace.json``       the swimlanes, as ``telemetry.trace`` writes them; without it the page has no such section
``videos/``          as ``telemetry.video.video_path`` names them
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vla3_plugin.telemetry import charts, page, swimlanes
from vla3_plugin.telemetry.charts import Line, Points
from vla3_plugin.telemetry.console import MODE_NAMES, format_bytes, format_seconds
from vla3_plugin.telemetry.metrics import (
    ENV_STEPS,
    ENV_STEPS_PER_S,
    EPISODE_LENGTH,
    RETURN,
    SUCCESS_RATE,
    Evaluation,
    MetricsError,
    before_after,
    difference_interval,
    read_evaluations,
    read_metrics,
    wilson_interval,
)
from vla3_plugin.telemetry.video import parse_video_path

REPORT_FILE = "report.html"
VIDEOS_PER_STEP = 8


@dataclass(frozen=True)
class Curve:
    """One chart of the learning section: the first of ``names`` that was recorded, or ``together`` all that were."""

    title: str
    names: tuple[str, ...]
    note: str
    together: bool = False


CURVES = (
    Curve("Return", (f"{RETURN}/mean", "critic/score/mean"), "mean of a step's episodes"),
    Curve("Episode length", (f"{EPISODE_LENGTH}/mean",), "control steps"),
    Curve("Policy loss", ("actor/pg_loss", "actor/policy_loss"), "clipped surrogate"),
    Curve("Value loss", ("critic/vf_loss", "actor/value_loss", "critic/value_loss"), "against returns"),
    Curve(
        "Explained variance",
        ("critic/vf_explained_var", "critic/explained_variance", "actor/explained_variance"),
        "of returns by the value; 1 is perfect",
    ),
    Curve("Approximate KL", ("actor/approx_kl", "actor/ppo_kl"), "old policy to new"),
    Curve(
        "Clip fraction",
        ("actor/clip_fraction", "actor/pg_clipfrac", "actor/clip_fraction_low", "actor/clip_fraction_high"),
        "samples at the clip",
        together=True,
    ),
    Curve("Entropy", ("actor/entropy", "actor/entropy_loss"), "of the noisy policy"),
    Curve("Gradient norm", ("actor/grad_norm",), "before clipping"),
    Curve(
        "Log-prob difference",
        ("rollout/logprob_diff_max", "actor/logprob_diff_max"),
        "rollout against learner, largest",
    ),
    Curve("Learning rate", ("actor/lr",), "of the policy"),
    Curve("Environment steps a second", (ENV_STEPS_PER_S,), "while collecting"),
)


def write_report(run_dir: Path | str) -> Path:
    """Write ``report.html`` into ``run_dir`` and return its path.

    Raises:
        FileNotFoundError: ``run_dir`` is not a directory. Nothing inside it is required.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"run_dir: {run_dir} is not a directory; give the directory that holds metrics.jsonl")
    faults: list[str] = []
    rows: list[dict[str, Any]] = _read(lambda: read_metrics(run_dir), faults) or []
    evaluations: list[Evaluation] = _read(lambda: read_evaluations(run_dir), faults) or []
    preflight: dict[str, Any] = _read(lambda: _read_json(run_dir / "preflight.json"), faults) or {}
    summary: dict[str, Any] = _read(lambda: _read_json(run_dir / "summary.json"), faults) or {}
    lanes = swimlanes.section(run_dir, rows, faults)
    title = " · ".join(dict.fromkeys([e.env for e in evaluations][:1] + [run_dir.resolve().name]))
    body = [
        _header(title, rows, summary, preflight, faults),
        _headline(rows, evaluations),
        page.section("Success", _success(rows, evaluations)),
        page.section("Rollouts", _videos(run_dir)),
        page.section("Tasks", _tasks(evaluations)),
        page.section("Learning", _curves(rows)),
        page.section("Time", _timing(rows)),
        *lanes,
        page.section("Evaluations", _evaluations(evaluations)),
        page.section("Machine and versions", _machine(preflight.get("machine") or summary.get("machine"))),
        page.section("Run", _run(preflight, summary)),
        page.section("Configuration", _config(run_dir / "config.yaml")),
    ]
    style = Path(__file__).with_name("report.css").read_text()
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    path, unfinished = run_dir / REPORT_FILE, run_dir / f".{REPORT_FILE}.{os.getpid()}.tmp"
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def _read(read: Callable[[], Any], faults: list[str]) -> Any:
    """A file that cannot be read becomes a line on the page, not the end of it."""
    try:
        return read()
    except (MetricsError, OSError, ValueError) as error:
        faults.append(str(error))
        return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} holds {type(data).__name__}, expected an object")
    return data


def _header(
    title: str, rows: list[dict[str, Any]], summary: dict[str, Any], preflight: dict[str, Any], faults: list[str]
) -> str:
    stamps = [t for t in page.numbers(rows, "time") if math.isfinite(t)]
    when = ""
    if stamps:
        first, last = (datetime.fromtimestamp(t, timezone.utc) for t in (stamps[0], stamps[-1]))
        when = f"{first:%Y-%m-%d %H:%M} to {last:%H:%M} UTC" if first.date() == last.date() else (
            f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC")  # fmt: skip
    status = str(summary.get("status") or ("no summary.json: the run is still going, or was stopped" if rows else ""))
    command = summary.get("command") or preflight.get("command")
    lines = [f"<h1>{escape(title)}</h1>"]
    lines.append(f'<p class="muted">{escape(" · ".join(part for part in (when, status) if part))}</p>')
    lines.append(
        f'<pre class="command">{escape(str(command))}</pre>' if command else page.missing("Command not recorded.")
    )
    lines += [f'<p class="warning">{escape(text)}</p>' for text in [*faults, *summary.get("notes", [])]]
    return "<header>\n" + "\n".join(lines) + "\n</header>"


def _headline(rows: list[dict[str, Any]], evaluations: list[Evaluation]) -> str:
    pair = before_after(evaluations)
    facts = {"training steps": f"{rows[-1]['step']:,}"} if rows else {}
    steps, elapsed = page.last(page.numbers(rows, ENV_STEPS)), page.last(page.numbers(rows, "elapsed_s"))
    if steps is not None:
        facts["environment steps"] = f"{steps:,.0f}"
    if elapsed is not None:
        facts["time"] = format_seconds(elapsed)
    if pair is None:
        found = f"{len(evaluations)} evaluation(s) recorded; before and after need two of one suite and mode."
        return page.missing(found) + page.facts(facts)
    before, after = pair
    change = difference_interval(before.table.total, after.table.total)
    gain = after.table.rate - before.table.rate
    direction = "up" if change[0] > 0 else "down" if change[1] < 0 else ""
    verdict = "" if direction else "; not distinguishable from no change"
    sides = [("before", before), ("after", after)]
    figures = [
        *(page.number(n, page.percent(e.table.rate), f"{_bounds(e)}%, step {e.step}") for n, e in sides),
        page.number("change, points", f"{100 * gain:+.1f}", f"{page.points(change, '+')}{verdict}", direction),
    ]
    peers = [e for e in evaluations if (e.env, e.mode) == (after.env, after.mode) and e.table.total[1]]
    best = max(peers, key=lambda e: e.table.rate)
    if best.table.rate > after.table.rate:
        facts["best evaluation"] = f"{page.percent(best.table.rate)} at step {best.step}"
    n, m = before.table.total[1], after.table.total[1]
    facts["evaluated on"] = f"{n} episodes each" if n == m else f"{n} episodes before, {m} after"
    facts["policy"] = MODE_NAMES.get(after.mode, after.mode)
    bars = charts.interval_chart([(name, e.table.rate, *e.table.interval()) for name, e in sides])
    note = "Success rate and its 95% Wilson interval; the change with Newcombe's interval."
    return (
        f'<div class="headline"><div><div class="figures">{"".join(figures)}</div>'
        f'<p class="muted">{note}</p></div><div>{bars}</div></div>{page.facts(facts)}'
    )


def _bounds(evaluation: Evaluation) -> str:
    return page.points(evaluation.table.interval())


def _success(rows: list[dict[str, Any]], evaluations: list[Evaluation]) -> str:
    """Three charts of one thing, over steps, environment steps and working time."""
    shown = [r for r in rows if isinstance(r.get(SUCCESS_RATE), (int, float))]
    if not shown and not evaluations:
        return page.missing("No training episode and no evaluation recorded.")
    several = len({e.env for e in evaluations}) > 1
    parts = []
    for label, key, seconds in (("step", "step", False), ("environment steps", ENV_STEPS, False),
                                ("time", "elapsed_s", True)):  # fmt: skip
        line = None
        if shown and any(math.isfinite(v) for v in page.numbers(shown, key)):
            line = Line("training", page.numbers(shown, key), page.numbers(shown, SUCCESS_RATE))
        groups: dict[tuple[str, str], Points] = {}
        for e in evaluations:
            x = _place(e, key, rows)
            if x is None or not e.table.total[1]:
                continue
            name = MODE_NAMES.get(e.mode, e.mode) + (f", {e.env}" if several else "")
            points = groups.setdefault((e.env, e.mode), Points(name, [], [], [], [], hollow=e.mode != "ode"))
            low, high = e.table.interval()
            for values, value in zip((points.x, points.rate, points.low, points.high),
                                     (x, e.table.rate, low, high), strict=True):  # fmt: skip
                values.append(value)
        if line is None and not groups:
            parts.append(page.missing(f"Success over {label}: {key} not recorded."))
        else:
            svg = charts.success_chart(line, list(groups.values()), label, seconds)
            parts.append(page.figure(f"over {'steps' if key == 'step' else label}", "", svg))
    note = (
        "Points: evaluations on assigned episodes with 95% intervals. Line: training episodes, sampled with "
        "exploration noise; the thick one is the mean of the last 5 steps."
    )
    return f'<div class="charts">{"".join(parts)}</div><p class="muted">{note}</p>'


def _place(evaluation: Evaluation, key: str, rows: list[dict[str, Any]]) -> float | None:
    """Where an evaluation stands on an axis: its own figure, or that of the last row up to its step."""
    if key == "step":
        return float(evaluation.step)
    own = evaluation.extra.get(key, evaluation.extra.get(key.removeprefix("env/").replace("steps_total", "env_steps")))
    if isinstance(own, (int, float)):
        return float(own)
    if evaluation.step == 0:
        return 0.0
    return page.last(page.numbers([r for r in rows if r["step"] <= evaluation.step], key))


def _videos(run_dir: Path) -> str:
    files = sorted((run_dir / "videos").rglob("*.mp4")) if (run_dir / "videos").is_dir() else []
    files = [f for f in files if not f.name.startswith(".")]
    if not files:
        return page.missing("No video recorded.")
    groups: dict[int | None, list[Path]] = {}
    for file in files:
        parsed = parse_video_path(file)
        groups.setdefault(parsed[0] if parsed else None, []).append(file)
    steps = sorted(step for step in groups if step is not None)
    # First and last step are what a reader compares; the rest are links.
    full = [*dict.fromkeys([*steps[:1], *steps[-1:]]), *([None] if None in groups else [])]
    parts = []
    for step in full:
        cells = "".join(_video(run_dir, file) for file in groups[step][:VIDEOS_PER_STEP])
        title = "other videos" if step is None else "before training" if step == 0 else f"step {step}"
        parts.append(f'<h3>{title}</h3><div class="videos">{cells}</div>')
    rest = [f for step, group in groups.items() for f in (group[VIDEOS_PER_STEP:] if step in full else group)]
    if rest:
        links = "<br>".join(f'<a href="{_link(run_dir, f)}">{escape(str(f.relative_to(run_dir)))}</a>' for f in rest)
        parts.append(f"<details><summary>{len(rest)} more</summary><p>{links}</p></details>")
    return "".join(parts)


def _link(run_dir: Path, file: Path) -> str:
    return quote(file.relative_to(run_dir).as_posix())


def _video(run_dir: Path, file: Path) -> str:
    parsed = parse_video_path(file)
    caption = escape(file.stem)
    if parsed:
        _, task, episode, success = parsed
        outcome = '<span class="good">success</span>' if success else '<span class="bad">failure</span>'
        caption = f"{outcome} · {escape(task.replace('-', ' '))}, episode {episode}"
    video = f'<video src="{_link(run_dir, file)}" controls muted loop playsinline preload="metadata"></video>'
    return f"<figure>{video}<figcaption>{caption}</figcaption></figure>"


def _tasks(evaluations: list[Evaluation]) -> str:
    if not evaluations:
        return page.missing("No evaluation recorded.")
    pair = before_after(evaluations)
    first, last = pair or (None, evaluations[-1])
    names = list(dict.fromkeys([*(first.table.counts if first else ()), *last.table.counts]))
    rows = []
    for name in [*names, None]:
        label = "all tasks" if name is None else escape(name)
        counts = [_counts(e, name) for e in (first, last)]
        cells = [_cell(*c) for c in counts[0 if first else 1 :]]
        both = first is not None and counts[0][1] and counts[1][1]
        gain = counts[1][0] / counts[1][1] - counts[0][0] / counts[0][1] if both else math.nan
        rows.append([label, *cells, *([f"{100 * gain:+.1f}" if both else ""] if first else [])])
    head = ["task", *([f"before, step {first.step}"] if first else []), f"{'after, ' if first else ''}step {last.step}"]
    suite = f'<p class="muted">{escape(last.env)}, {escape(MODE_NAMES.get(last.mode, last.mode))}</p>'
    return suite + page.table(head + (["points"] if first else []), rows, total=True)


def _counts(evaluation: Evaluation | None, task: str | None) -> tuple[int, int]:
    if evaluation is None:
        return 0, 0
    return evaluation.table.total if task is None else evaluation.table.counts.get(task, (0, 0))


def _cell(successes: int, n: int) -> str:
    if n == 0:
        return '<span class="muted">not evaluated</span>'
    bounds = page.points(wilson_interval(successes, n))
    return f'{page.percent(successes / n)} <span class="muted">[{bounds}] {successes}/{n}</span>'


def _curves(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return page.missing("No metrics.jsonl, or no step in it.")
    steps, parts, absent = page.numbers(rows, "step"), [], []
    for curve in CURVES:
        keys = [name for name in curve.names if any(name in row for row in rows)]
        keys = keys if curve.together else keys[:1]
        if not keys:
            absent.append(curve.title.lower())
            continue
        lost = sum(1 for row in rows for key in keys if key in row and row[key] is None)
        note = f"{curve.note}; {lost} non-finite" if lost else curve.note
        labels = [key.rsplit("/", 1)[1].replace("_", " ").removeprefix(f"{curve.title.lower()} ") for key in keys]
        lines = [Line(label, steps, page.numbers(rows, key)) for label, key in zip(labels, keys, strict=True)]
        parts.append(page.figure(curve.title, note, charts.line_chart(lines, "step", curve.title)))
    tail = page.missing(f"Not recorded: {', '.join(absent)}.") if absent else ""
    return f'<div class="charts">{"".join(parts)}</div>{tail}'


def _timing(rows: list[dict[str, Any]]) -> str:
    """Stages of a step, stacked. Nested timings (a second slash) are detail of a stage and left out."""
    prefix = "timing_s/"
    names = dict.fromkeys(k for r in rows for k in r if k.startswith(prefix) and "/" not in k[len(prefix) :])
    names.pop(f"{prefix}step", None)
    if not names:
        return page.missing("No stage timings recorded.")
    stages = {name[len(prefix) :].replace("_", " "): page.numbers(rows, name) for name in names}
    svg = charts.stacked_chart(page.numbers(rows, "step"), stages, "step", "timing")
    note = "seconds a step; stages that overlap add up to more than the step took"
    return f'<div class="charts wide">{page.figure("Time by stage", note, svg)}</div>'


def _evaluations(evaluations: list[Evaluation]) -> str:
    if not evaluations:
        return page.missing("No evaluations.jsonl, or no record in it.")
    rows = [
        [escape(e.env), escape(MODE_NAMES.get(e.mode, e.mode)), f"{e.step:,}", _cell(*e.table.total),
         format_seconds(e.ended - e.started)]
        for e in evaluations
    ]  # fmt: skip
    return page.table(["suite", "policy", "step", "success", "took"], rows, text_columns=2)


def _machine(machine: Any) -> str:
    if not isinstance(machine, Mapping):
        return page.missing("Hardware and versions not recorded (no preflight.json).")
    shown = {k: v for k, v in machine.items() if k != "memory"}
    if isinstance(machine.get("memory"), (int, float)):
        shown["memory"] = format_bytes(machine["memory"])
    shown["gpus"] = machine.get("gpus") or "none"
    return page.pairs(shown)


def _run(preflight: dict[str, Any], summary: dict[str, Any]) -> str:
    hidden = {"machine", "command", "notes"}
    memory = preflight.get("memory")
    shown = {k: v for k, v in preflight.items() if k not in hidden | {"memory"}}
    if isinstance(memory, Mapping) and "total" in memory:
        shown["memory_estimate"] = f"{format_bytes(memory['total'])}"
    shown |= {k: v for k, v in summary.items() if k not in hidden}
    return page.pairs(shown) if shown else page.missing("No preflight.json and no summary.json.")


def _config(path: Path) -> str:
    if not path.exists():
        return page.missing("No config.yaml.")
    text = escape(path.read_text(errors="replace"))
    return f"<details><summary>resolved configuration</summary><pre>{text}</pre></details>"
