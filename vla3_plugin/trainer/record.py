"""What a run leaves behind: metrics, evaluations, the config, the machine, a summary and a report."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from vla3_plugin.telemetry.console import StepLine, describe_machine, format_outcome, format_rate
from vla3_plugin.telemetry.metrics import Evaluation, MetricsWriter, before_after, read_evaluations, read_metrics


class RunRecord:
    """Writes into ``run_dir``; everything is appended or replaced as a whole, so a killed run keeps what it had."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsWriter(run_dir)
        self.line: StepLine | None = None
        self.notes: list[str] = []
        self.best: dict[str, Any] | None = None  # the best evaluation of the noise-free policy: step, rate, n
        for evaluation in read_evaluations(run_dir):
            self._compare(evaluation)

    def start(self, config: dict[str, Any]) -> None:
        (self.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        self._summary({"machine": describe_machine(), "status": "running"})

    def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        self.metrics.log(step, metrics)
        if self.line is None:
            self.line = StepLine(total, start=step - 1)
        self.line.update(step, metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.metrics.log_evaluation(evaluation)
        self._compare(evaluation)
        print(f"vla3: step {evaluation.step}, {evaluation.mode} policy: {format_rate(evaluation)}", flush=True)
        if len(evaluation.table.counts) > 1:
            print(evaluation.table.format(), flush=True)

    def note(self, text: str) -> None:
        """Something the user must hear of, now and in the report."""
        self.notes.append(text)
        print(f"vla3: {text}", file=sys.stderr, flush=True)

    def resumed(self, step: int, best: dict[str, Any] | None, metrics: dict[str, Any] | None = None) -> None:
        """The run goes on after ``step``; ``best`` is the best evaluation as its checkpoint knows it.

        ``metrics`` are the step's as far as they were known then: its row, if the run ended before that was written.
        """
        self.best = best
        known = read_metrics(self.run_dir)
        if metrics and step - 1 == (known[-1]["step"] if known else 0):
            self.metrics.log(step, metrics)
        for evaluation in read_evaluations(self.run_dir):
            if evaluation.step <= step:  # what came later is of a future that the resume took back
                self._compare(evaluation)

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The one of ``steps`` whose evaluation was best, None where none of them has been evaluated."""
        rates = {e.step: e.table.rate for e in read_evaluations(self.run_dir) if _counts(e)}
        return max((s for s in steps if s in rates), key=lambda s: (rates[s], s), default=None)

    def _compare(self, evaluation: Evaluation) -> None:
        if _counts(evaluation) and (self.best is None or evaluation.table.rate >= self.best["rate"]):
            self.best = {"step": evaluation.step, "rate": evaluation.table.rate, "n": evaluation.table.total[1]}

    def finish(self, completed: bool) -> str:
        """Close the files, write summary and report; the last line for the user."""
        if self.line is not None:
            self.line.close()
        self.metrics.close()
        pair = before_after(read_evaluations(self.run_dir))
        outcome = format_outcome(*pair) if pair else "no two evaluations to compare"
        summary = json.loads((self.run_dir / "summary.json").read_text())
        ending = {"status": "completed" if completed else "stopped early", "outcome": outcome}
        self._summary(summary | ending | {"notes": self.notes, "best_evaluation": self.best})
        from vla3_plugin.telemetry.report import write_report

        report = write_report(self.run_dir)
        return f"vla3: {outcome}\nvla3: report {report}"

    def _summary(self, data: dict[str, Any]) -> None:
        path = self.run_dir / "summary.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True))
        temporary.replace(path)


def _counts(evaluation: Evaluation) -> bool:
    """Whether it says how good the noise-free policy is."""
    return evaluation.mode == "ode" and evaluation.whole
