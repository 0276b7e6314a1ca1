"""``vla3 doctor``: what is installed, what would run where, what is missing; each fault with what mends it.

Every check is a function that returns findings. What can crash, hang, or must see a fresh interpreter (verl's import,
drivers, simulators) runs in a child process with a deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "bad"]
_MARKS = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}
_TAIL = 12  # lines of a child's output that a finding quotes


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``bad``: a run that needs it cannot start; ``warn``: it can, and something is worth knowing.

    ``fix`` is one command or one sentence; only an ``ok`` finding has none.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


Check = Callable[[], Sequence[Finding]]


class ProbeError(RuntimeError):
    """A probe in a child process failed, hung or answered nothing."""


def probe(arguments: Sequence[str], deadline_s: float, python: str | None = None) -> Any:
    """The JSON value on the last line that ``python *arguments`` prints.

    Raises:
        ProbeError: it did not end in time, failed, or printed no JSON; the message holds its last output.
    """
    command = [python or sys.executable, *arguments]
    environ = dict(os.environ)
    if python is not None:  # as a simulator's interpreter is started
        environ = {k: v for k, v in environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s, env=environ,
            errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {deadline_s:g} s") from None
    except OSError as error:
        raise ProbeError(f"{command[0]} does not start: {error}") from None
    lines = done.stdout.strip().splitlines()
    try:
        if done.returncode == 0:
            return json.loads(lines[-1])
    except (IndexError, ValueError):
        pass
    tail = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-_TAIL:])
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"exited with {done.returncode}"
    raise ProbeError(f"it {how}: {tail or 'no output'}")


def _checks(quick: bool, python: str | None, recipe: str) -> list[Check]:
    from vla3_plugin import doctor_packages as packages

    checks: list[Check] = [
        packages.check_python,
        packages.check_versions,
        packages.check_dependencies,
        packages.check_libero_packages,
        packages.check_embedded_weights,
        lambda: packages.check_plugin(quick),
    ]
    if packages.installed("numpy") is None:
        return checks  # found above; nothing below can be asked without it
    from vla3_plugin import doctor_machine as machine
    from vla3_plugin import doctor_simulators as simulators

    checks += [
        machine.check_devices,
        simulators.check_opengl,
        simulators.check_vulkan,
        lambda: simulators.check_simulators(python),
        machine.check_shared_memory,
        machine.check_file_descriptors,
        machine.check_memory,
        machine.check_ports,
    ]
    if python is not None:
        checks.append(lambda: simulators.check_interpreter(python))
    if not quick:
        checks += [lambda: machine.check_recipe(recipe), lambda: simulators.check_smoke(python)]
    return checks


def _run(check: Check) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # a check that fails is a finding of its own, the others go on
        name = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = (
            f"this check failed: {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        )
        return [Finding(name, "bad", detail, "mend what it names and run vla3 doctor again")]


def examine(quick: bool = False, python: str | None = None, recipe: str = "vla3_quickstart") -> dict[str, Any]:
    """``{"ok", "findings"}`` as plain data; ``ok`` is false where a run could not start.

    ``quick`` leaves out what takes long: loading every patch's target, the recipe's fit and the simulators' smoke.
    ``python``: another interpreter for the simulators, as ``vla3.env.python``. ``recipe``: whose placement must fit.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        findings = [finding for found in pool.map(_run, _checks(quick, python, recipe)) for finding in found]
    return {"ok": all(f.state != "bad" for f in findings), "findings": [asdict(f) for f in findings]}


def format_findings(report: dict[str, Any]) -> str:
    """One line a finding and one for its fix; a last line that counts."""
    rows = report["findings"]
    width = max(len(row["name"]) for row in rows)
    lines = []
    for row in rows:
        first, *rest = row["detail"].splitlines() or [""]
        lines.append(f"{_MARKS[row['state']]} {row['name']:<{width}}  {first}")
        lines += [" " * (width + 7) + line for line in rest]
        if row["fix"]:
            lines.append(" " * (width + 7) + f"fix: {row['fix']}")
    count = {state: sum(row["state"] == state for row in rows) for state in ("bad", "warn")}
    verdict = "a run can start" if report["ok"] else f"{count['bad']} found that would stop a run"
    return "\n".join([*lines, f"{verdict}; {count['warn']} worth a look"])
