"""The report of a synthetic run: complete, partial, damaged and empty; a page that loads nothing from elsewhere."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from vla3_plugin.telemetry import charts
from vla3_plugin.telemetry.jsonl import JsonlWriter, plain
from vla3_plugin.telemetry.metrics import ENV_STEPS, Evaluation, MetricsWriter, SuccessTable
from vla3_plugin.telemetry.report import write_report
from vla3_plugin.telemetry.video import video_path, write_video

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting, and collects text, tags and everything that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == [], f"never closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "data", "poster", "action") and value]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
            self.stack.pop()

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(run_dir: Path) -> Page:
    raw = write_report(run_dir).read_text()
    assert "http:" not in raw and "https:" not in raw, "the page must work without a network"
    assert "@import" not in raw and "<script" not in raw
    page = Page(raw)
    for target in page.loads:
        assert target.startswith("#") or (run_dir / target).exists(), (
            f"{target} is neither inside the page nor beside it"
        )
    return page


def write_run(run_dir: Path, steps: int = 12, tasks: tuple[str, ...] = ("push <b>cube</b>", "stack")) -> None:
    writer = MetricsWriter(run_dir)

    def evaluate(step: int, successes: int, mode: str = "ode") -> None:
        table = SuccessTable({task: (successes, 20) for task in tasks})
        writer.log_evaluation(Evaluation(step, "maniskill", mode, table, 0.0, 65.0))

    evaluate(0, 6)
    evaluate(0, 4, "sde")
    for step in range(1, steps + 1):
        writer.log(
            step,
            {
                "env/success_rate": 0.3 + 0.05 * step,
                "env/return/mean": 0.1 * step,
                ENV_STEPS: 800 * step,
                "env/steps_per_s": 110.0,
                "actor/pg_loss": -0.01 * step,
                "actor/approx_kl": 0.01,
                "actor/clip_fraction_low": 0.1,
                "actor/clip_fraction_high": 0.12,
                "actor/grad_norm": math.nan if step == 3 else 1.0,
                "critic/vf_explained_var": 0.5,
                "timing_s/gen": 5.0,
                "timing_s/update_actor": 3.0,
                "timing_s/step": 8.5,
            },
        )
    evaluate(steps, 19)
    writer.close()


def write_complete_run(path: Path) -> Path:
    write_run(path)
    machine = {
        "cpu": "Some CPU",
        "cores": 2,
        "memory": 16e9,
        "gpus": [],
        "python": "3.11.2",
        "versions": {"verl": "0.9.1"},
    }
    preflight = {"command": "python -m verl.trainer.main recipe=vla3_maniskill", "machine": machine}
    (path / "preflight.json").write_text(json.dumps(plain({**preflight, "policy": {"preset": "pi0-nano"}})))
    (path / "summary.json").write_text(json.dumps({"status": "finished", "notes": ["ran with a noisy neighbour"]}))
    (path / "config.yaml").write_text("vla3:\n  seed: 1  # <3\n")
    frames = np.full((2, 64, 64, 3), 90, np.uint8)
    write_video(video_path(path, 0, "push cube", 3, False), frames, 10, False)
    write_video(video_path(path, 5, "push cube", 3, True), frames, 10, True)
    write_video(video_path(path, 12, "push cube", 3, True), frames, 10, True)
    return path


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    """The page of a complete run, parsed and raw."""
    path = write_complete_run(tmp_path_factory.mktemp("runs") / "pick_run")
    return read(path), (path / "report.html").read_text()


def test_a_complete_run_shows_before_and_after_with_intervals(complete):
    page, _ = complete
    assert "before 30.0% 18.1 to 45.4%, step 0" in page.text
    assert "after 95.0% 83.5 to 98.6%, step 12" in page.text
    assert "change, points +65.0" in page.text
    assert "40 episodes each" in page.text and "noise-free policy" in page.text
    assert "12 environment steps 9,600" in page.text
    assert "python -m verl.trainer.main recipe=vla3_maniskill" in page.text
    assert "Some CPU" in page.text and "verl: 0.9.1" in page.text and "pi0-nano" in page.text
    assert "ran with a noisy neighbour" in page.text
    assert "seed: 1 # <3" in page.text


def test_a_complete_run_draws_its_curves_and_names_those_it_lacks(complete):
    page, _ = complete
    titles = ("over steps", "over environment steps", "over time", "Return", "Policy loss", "Approximate KL")
    for title in (*titles, "Clip fraction", "Explained variance", "Environment steps a second", "Time by stage"):
        assert title in page.text, title
    assert page.tags.count("svg") == 1 + 3 + 7 + 1, "interval, success, learning, timing"
    assert "Not recorded: episode length, value loss, entropy, log-prob difference, learning rate." in page.text
    assert "before clipping; 1 non-finite" in page.text


def test_tasks_are_compared_one_by_one_and_their_names_are_no_markup(complete):
    page, _ = complete
    assert "push <b>cube</b> 30.0% [14.5 to 51.9] 6/20 95.0% [76.4 to 99.1] 19/20 +65.0" in page.text
    assert "all tasks 30.0% [18.1 to 45.4] 12/40 95.0% [83.5 to 98.6] 38/40 +65.0" in page.text
    assert "b" not in page.tags


def test_videos_of_the_first_and_last_step_stand_in_the_page_by_relative_path(complete):
    page, _ = complete
    assert page.loads.count("videos/step-000000/push-cube-ep3-failure.mp4") == 1
    assert "before training failure · push cube, episode 3" in page.text
    assert "step 12 success · push cube, episode 3" in page.text
    assert page.tags.count("video") == 2 and "1 more" in page.text, "what lies between is a link"


def test_charts_follow_the_colours_of_the_page(complete):
    _, raw = complete
    svg = raw[raw.index("<svg") : raw.rindex("</svg>")]
    assert "var(--ink)" in svg and "var(--series-0)" in svg
    assert "#0" not in svg, "no marker colour is left over"
    assert "prefers-color-scheme: dark" in raw and "@media print" in raw


def test_an_empty_run_says_what_is_missing(tmp_path):
    page = read(tmp_path)
    for text in (
        "0 evaluation(s) recorded",
        "Command not recorded",
        "No training episode and no evaluation recorded",
        "No video recorded",
        "No metrics.jsonl, or no step in it",
        "No stage timings recorded",
        "Hardware and versions not recorded",
        "No config.yaml",
    ):
        assert text in page.text, text
    assert "svg" not in page.tags


def test_a_run_killed_in_the_middle_of_a_line_is_reported_up_to_it(tmp_path):
    write_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "env/success_r')
    page = read(tmp_path)
    assert "training steps 12" in page.text
    assert "the run is still going, or was stopped" in page.text


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    write_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0][:20], *lines[1:]]) + "\n")
    (tmp_path / "summary.json").write_text("{")
    page = read(tmp_path)
    assert "metrics.jsonl, line 1" in page.text and "summary.json is not valid JSON" in page.text
    assert "after 95.0%" in page.text, "evaluations are unharmed"


def test_one_evaluation_is_shown_without_a_comparison(tmp_path):
    with JsonlWriter(tmp_path / "evaluations.jsonl") as writer:
        writer.append(Evaluation(0, "libero_goal", "ode", SuccessTable({"t": (3, 4)}), 0, 1).to_dict())
    page = read(tmp_path)
    assert "1 evaluation(s) recorded; before and after need two" in page.text
    assert "t 75.0% [30.1 to 95.4] 3/4" in page.text


def test_a_fall_and_a_better_evaluation_before_it_are_not_hidden(tmp_path):
    with JsonlWriter(tmp_path / "evaluations.jsonl") as writer:
        for step, successes in ((0, 60), (5, 90), (9, 10)):
            writer.append(Evaluation(step, "s", "ode", SuccessTable({"t": (successes, 100)}), 0, 1).to_dict())
    raw = write_report(tmp_path).read_text()
    assert 'class="number down">-50.0' in raw
    assert "best evaluation 90.0% at step 5" in Page(raw).text


def test_a_change_within_the_noise_is_called_so(tmp_path):
    with JsonlWriter(tmp_path / "evaluations.jsonl") as writer:
        for step, successes in ((0, 10), (5, 12)):
            writer.append(Evaluation(step, "s", "ode", SuccessTable({"t": (successes, 20)}), 0, 1).to_dict())
    assert "not distinguishable from no change" in read(tmp_path).text


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the directory that holds metrics.jsonl"):
        write_report(tmp_path / "absent")


def test_the_report_of_a_long_run_stays_small(tmp_path):
    write_run(tmp_path, steps=3000)
    assert write_report(tmp_path).stat().st_size < 1_000_000


def test_buckets_keep_means_and_gaps():
    x, y = charts.bucket(range(1000), [math.nan] * 100 + [2.0] * 900, most=10)
    assert len(x) == 10 and math.isnan(y[0]) and y[1:].tolist() == [2.0] * 9
    assert x[0] == pytest.approx(49.5)
    assert charts.bucket([1, 2], [3, 4])[1].tolist() == [3, 4]


def test_the_trailing_mean_never_looks_ahead():
    np.testing.assert_allclose(charts.trailing_mean([1, 3, 5, math.nan, 7], window=2), [1, 2, 4, 5, 7])
