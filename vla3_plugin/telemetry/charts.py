"""Charts of the report: matplotlib figures as inline SVG that follow the page's light or dark colours.

Colours are drawn as marker values and exchanged in the SVG text for CSS variables, and text stays text, so the page's
style sheet has the last word on both. The SVG refers to nothing outside itself.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTH, HEIGHT = 3.6, 2.1  # inches at 72 points: the page scales them
MAX_POINTS = 400
MAX_BARS = 100
_INK, _MUTED, _GRID, _PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0500{i:02d}" for i in range(8))
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid", _PAPER: "--paper"}
_VARIABLES |= {colour: f"--series-{i}" for i, colour in enumerate(SERIES)}


@dataclass
class Points:
    """Evaluations on a success chart: rates and bounds in [0, 1], one per x."""

    label: str
    x: list[float]
    rate: list[float]
    low: list[float]
    high: list[float]
    hollow: bool = False


@dataclass
class Line:
    """A curve; NaN leaves a gap."""

    label: str
    x: list[float]
    y: list[float]


Values = Sequence[float] | np.ndarray


def bucket(x: Values, y: Values, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points: means over neighbours (NaN ignored; a bucket of NaN stays NaN)."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(xs) <= most:
        return xs, ys
    edges = np.linspace(0, len(xs), most + 1).astype(int)
    pairs = list(zip(edges[:-1], edges[1:], strict=True))
    means = [np.nanmean(ys[a:b]) if np.isfinite(ys[a:b]).any() else math.nan for a, b in pairs]
    return np.array([xs[a:b].mean() for a, b in pairs]), np.array(means)


def trailing_mean(y: Values, window: int = 5) -> np.ndarray:
    """Mean of the last ``window`` values at each point, NaN ignored: it never looks ahead."""
    ys = np.asarray(y, np.float64)
    parts = [ys[max(0, i + 1 - window) : i + 1] for i in range(len(ys))]
    return np.array([np.nanmean(p) if np.isfinite(p).any() else math.nan for p in parts])


def success_chart(training: Line | None, evaluations: Sequence[Points], x_label: str, seconds: bool = False) -> str:
    """Success in percent: training episodes as a thin line and its trailing mean, evaluations with their intervals."""

    def draw(ax: Any) -> None:
        if training is not None and len(training.x):
            ax.plot(*bucket(training.x, 100 * np.asarray(training.y)), color=SERIES[0], lw=0.8, alpha=0.35)
            mean = trailing_mean(100 * np.asarray(training.y))
            ax.plot(*bucket(training.x, mean), color=SERIES[0], lw=1.8, label=training.label)
        for points in evaluations:
            rate, low, high = (100 * np.asarray(v) for v in (points.rate, points.low, points.high))
            colour = _MUTED if points.hollow else _INK
            ax.errorbar(
                points.x, rate, yerr=[rate - low, high - rate], fmt="o-", ms=4.5, lw=1.0, elinewidth=1.0, capsize=2.5,
                color=colour, mfc=_PAPER if points.hollow else colour, label=points.label, zorder=3,
            )  # fmt: skip
        ax.set_ylim(-4, 104)
        ax.set_yticks([0, 25, 50, 75, 100])
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0f}%")

    return _svg(draw, x_label, f"success-{x_label}", seconds=seconds, legend=True)


def line_chart(lines: Sequence[Line], x_label: str, key: str) -> str:
    """One or more curves over the same x."""

    def draw(ax: Any) -> None:
        for line, colour in zip(lines, SERIES, strict=False):
            x, y = bucket(line.x, line.y)
            ax.plot(x, y, color=colour, lw=1.5, label=line.label, marker="o" if len(x) <= 30 else None, ms=2.6)

    return _svg(draw, x_label, key, legend=len(lines) > 1)


def stacked_chart(x: Values, stages: dict[str, list[float]], x_label: str, key: str) -> str:
    """Stacked bars, one stack a step (a bucket of steps when there are many). Stages beyond the palette are merged."""

    def draw(ax: Any) -> None:
        names = sorted(stages, key=lambda name: -float(np.nansum(stages[name])))
        shown, merged = names[: len(SERIES) - 1], names[len(SERIES) - 1 :]
        heights = {name: bucket(x, stages[name], MAX_BARS)[1] for name in names}
        rows = {name: heights[name] for name in shown}
        if merged:
            rows["the rest"] = np.nansum([heights[name] for name in merged], axis=0)
        xs = bucket(x, x, MAX_BARS)[0]
        width = 0.9 * (float(np.min(np.diff(xs))) if len(xs) > 1 else 1.0)
        bottom = np.zeros(len(xs))
        for (name, height), colour in zip(rows.items(), SERIES, strict=False):
            height = np.nan_to_num(height)
            ax.bar(xs, height, width, bottom=bottom, color=colour, label=name, lw=0)
            bottom += height
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:g} s")

    return _svg(draw, x_label, key, legend=True, width=2.6 * WIDTH, height=1.2 * HEIGHT)


def interval_chart(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Rates with their intervals on one percent scale, one row each (label, rate, low, high), in [0, 1]."""

    def draw(ax: Any) -> None:
        for y, (_, rate, low, high) in enumerate(reversed(rows)):
            last = y == 0
            colour = SERIES[0] if last else _MUTED
            ax.plot([100 * low, 100 * high], [y, y], color=colour, lw=3, alpha=0.45, solid_capstyle="round")
            ax.plot([100 * rate], [y], "o", color=colour, ms=7)
        ax.set_ylim(-0.6, len(rows) - 0.4)
        ax.set_xlim(-2, 102)
        ax.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)])
        ax.set_xticks([0, 25, 50, 75, 100], ["0%", "25%", "50%", "75%", "100%"])
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", color=_GRID, lw=0.8)
        ax.spines["left"].set_visible(False)

    return _svg(draw, "", "interval", height=0.4 + 0.3 * len(rows), x_numbers=False)


def _count(value: float, _: Any = None) -> str:
    """Axis labels of large counts: 800, 12k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _duration(value: float, _: Any = None) -> str:
    return f"{value / 3600:g} h" if value >= 3600 else f"{value / 60:g} min"


def _svg(
    draw: Callable[[Any], None],
    x_label: str,
    key: str,
    *,
    seconds: bool = False,
    legend: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
    x_numbers: bool = True,
) -> str:
    """Draw on fresh axes and return ``<svg>`` text. ``key`` keeps the ids of two charts of one page apart."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: no global state, no window system
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": key,
        "font.size": 9,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _MUTED,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "text.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.limits": (-3, 4),
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        ax = figure.add_subplot()
        ax.grid(axis="y", color=_GRID, lw=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(length=0, pad=4)
        draw(ax)
        if x_numbers and seconds:
            low, high = ax.get_xlim()
            ax.xaxis.set_major_locator(MultipleLocator(_time_step(high - low)))
            ax.xaxis.set_major_formatter(_duration)
        elif x_numbers:
            ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
            ax.xaxis.set_major_formatter(_count)
        ax.set_xlabel(x_label, loc="right", fontsize=8.5)
        handles, labels = ax.get_legend_handles_labels()
        if legend and handles:
            figure.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=1.2, columnspacing=1.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), key)


def _time_step(span: float) -> float:
    """Spacing of ticks on a time axis of ``span`` seconds: about five of them, at round minutes or hours."""
    steps = (30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    return next((float(s) for s in steps if span / s <= 6), math.ceil(span / 6 / 86400) * 86400.0)


def _inline(text: str, key: str) -> str:
    """SVG for the inside of an HTML page: no prolog, metadata, name spaces or group ids; variables as colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s*xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{re.sub("[^A-Za-z0-9 ]+", " ", key).strip()}"', 1).strip()
