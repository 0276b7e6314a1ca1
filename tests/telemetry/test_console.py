"""What the console says: preflight, one line a step, before and after."""

from __future__ import annotations

import io
import sys

import pytest

from vla3_plugin.placement.memory import estimate
from vla3_plugin.telemetry import console
from vla3_plugin.telemetry.console import (
    StepLine,
    command_line,
    describe_machine,
    format_bytes,
    format_outcome,
    format_preflight,
    format_seconds,
    format_step,
)
from vla3_plugin.telemetry.metrics import Evaluation, SuccessTable

METRICS = {"env/success_rate": 0.4375, "env/episodes": 16.0, "env/steps_per_s": 118.3, "env/return/mean": 0.61}


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _preflight() -> dict:
    memory = estimate(parameters=2_400_000, env="libero", env_workers=1, env_processes=2)
    return {
        "profile": {"name": "cpu", "why": "no CUDA device found"},
        "machine": {"cpu": "A CPU", "cores": 2, "memory": 16e9, "gpus": ["H", "H"], "versions": {"verl": "0.9.1"}},
        "policy": {"preset": "pi0-nano", "parameters": 2_400_000},
        "step": {"episodes": 16, "optimizer_updates": 8, "whiten": True},
        "memory": {**memory, "available": 10e9, "warning": "it fits with little to spare"},
    }


def test_the_preflight_summary_shows_every_section(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = format_preflight(_preflight())
    for piece in ("cpu: no CUDA device found", "A CPU, 2 core(s)", "2 x H", "verl 0.9.1", "pi0-nano", "2,400,000"):
        assert piece in text, piece
    assert "optimizer updates" in text and "whiten" in text and "yes" in text
    assert "about 7.66 GB of 10.0 GB free" in text, "4 simulators, 3.6 six processes, 0.06 tensors"
    assert "2 process(es) of 1 slot(s) x 2.00 GB" in text
    assert "it fits with little to spare" in text


def test_the_preflight_summary_keeps_to_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    summary = {**_preflight(), "envs": {"tasks": [f"task-{i}" for i in range(40)]}}
    lines = format_preflight(summary).splitlines()
    assert max(map(len, lines)) <= 80
    assert "task-39" in " ".join(lines), "long values wrap, nothing is cut"


def test_the_preflight_summary_takes_sections_that_it_does_not_know():
    text = format_preflight({"run": "demo", "checks": ["a", "b"], "extra": {"nested": {"x": 1}, "none": None}})
    assert "demo" in text and "x 1" in text and "not given" in text
    assert format_preflight({}) != ""


def test_the_machine_is_described_with_what_is_installed():
    machine = describe_machine(("numpy", "no-such-package-here"))
    assert set(machine["versions"]) == {"numpy"}
    assert machine["cores"] >= 1 and machine["memory"] > 1e8 and machine["python"].count(".") == 2
    assert isinstance(machine["gpus"], list) and machine["cpu"]


def test_the_command_is_what_a_shell_takes(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command_line(["/usr/bin/vla3", "eval", "a b"]) == "vla3 eval 'a b'"

    class Spec:
        name = "verl.trainer.main"

    monkeypatch.setattr(sys.modules["__main__"], "__spec__", Spec)
    assert command_line(["/x/main.py", "recipe=vla3_libero"]) == "python -m verl.trainer.main recipe=vla3_libero"


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (46.6, "47s"), (185, "3m05s"), (3599.7, "1h00m"), (4320, "1h12m"), (float("inf"), "?")]
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("amount, text", [(12, "12 B"), (812_000, "812 kB"), (2.4e9, "2.40 GB"), (25.3e9, "25.3 GB")])
def test_bytes(amount, text):
    assert format_bytes(amount) == text


def test_a_step_is_one_line():
    line = format_step(METRICS, 12, 40, seconds_left=192)
    assert line == "step 12/40 | success 44%/16ep | return 0.61 | env steps/s 118 | left 3m12s"
    assert format_step({"env/steps_per_s": 7.0}) == "env steps/s 7"


def test_progress_off_a_terminal_is_a_line_a_step_with_time_left(monkeypatch):
    clock, out = Clock(monkeypatch), io.StringIO()
    progress = StepLine(total=4, stream=out)
    for step, now in ((1, 10.0), (2, 30.0), (3, 50.0)):
        clock.now = now
        progress.update(step, METRICS)
    progress.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/4 | success 44%/16ep") and lines[0].endswith("left 30s")
    assert lines[2].endswith("left 17s"), "50 s over 3 steps, one step to go"


def test_time_left_forgets_a_slow_start(monkeypatch):
    clock = Clock(monkeypatch)
    progress = StepLine(total=20, start=0, stream=io.StringIO(), window=4)
    clock.now = 1000.0
    progress.update(1, {})
    for step in range(2, 11):
        clock.now += 2.0
        progress.update(step, {})
    assert progress.seconds_left() == pytest.approx(2.0 * 10)


def test_a_resumed_run_counts_only_what_is_left(monkeypatch):
    clock = Clock(monkeypatch)
    progress = StepLine(total=10, start=6, stream=io.StringIO())
    assert progress.seconds_left() is None
    clock.now = 5.0
    progress.update(7, {})
    assert progress.seconds_left() == pytest.approx(15.0)


def test_progress_on_a_terminal_is_a_bar():
    out = Terminal()
    progress = StepLine(total=4, start=2, stream=out)
    progress.update(3, METRICS)
    progress.close()
    assert "3/4" in out.getvalue() and "success=44%/16ep" in out.getvalue() and "left=" in out.getvalue()


def _evaluation(successes: int, n: int) -> Evaluation:
    return Evaluation(0, "libero_object", "ode", SuccessTable({"t": (successes, n)}), 0, 1)


def test_the_last_line_gives_before_after_and_the_change():
    line = format_outcome(_evaluation(31, 100), _evaluation(92, 100))
    assert line == (
        "libero_object, noise-free policy: success 31.0% [22.8, 40.6] (31/100) → 92.0% [85.0, 95.9] (92/100), "
        "+61.0 points [+49.1, +70.1]"
    )


def test_the_last_line_does_not_sell_noise_as_progress():
    assert format_outcome(_evaluation(10, 20), _evaluation(12, 20)).endswith("; not distinguishable from no change")
    assert "no episode" in format_outcome(_evaluation(0, 0), _evaluation(12, 20))
