"""Intervals against published tables, success tables, and files that survive a kill."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.telemetry.metrics import (
    Evaluation,
    JsonlWriter,
    MetricsError,
    MetricsWriter,
    SuccessTable,
    aggregate,
    before_after,
    difference_interval,
    episode_metrics,
    histogram,
    read_evaluations,
    read_jsonl,
    read_metrics,
    wilson_interval,
)

counts = st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


# Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    "successes, n, low, high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_is_that_of_the_published_table(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


# Newcombe 1998, Statistics in Medicine 17:873-890, table II, method 10; there p1 - p2, here after - before.
@pytest.mark.parametrize(
    "before, after, low, high",
    [
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 29), (5, 56), -0.0381, 0.1926),
        ((0, 20), (0, 10), -0.1611, 0.2775),
        ((0, 10), (10, 10), 0.6075, 1.0),
    ],
)
def test_difference_interval_is_that_of_the_published_table(before, after, low, high):
    assert difference_interval(before, after) == pytest.approx((low, high), abs=5e-5)


@given(counts)
def test_wilson_interval_lies_in_zero_one_and_contains_the_estimate(count):
    successes, n = count
    low, high = wilson_interval(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert low < high


@given(counts, st.integers(2, 20))
def test_wilson_interval_narrows_with_more_episodes_at_the_same_rate(count, factor):
    few, many = wilson_interval(*count), wilson_interval(factor * count[0], factor * count[1])
    assert many[1] - many[0] < few[1] - few[0]


@given(counts)
def test_wilson_interval_of_failures_mirrors_that_of_successes(count):
    successes, n = count
    low, high = wilson_interval(successes, n)
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_interval_widens_with_confidence_and_knows_nothing_without_trials():
    wide, narrow = wilson_interval(7, 20, 0.99), wilson_interval(7, 20, 0.8)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("successes, n, confidence", [(5, 4, 0.95), (-1, 4, 0.95), (1, -1, 0.95), (1, 4, 1.0)])
def test_wilson_interval_refuses_impossible_counts(successes, n, confidence):
    with pytest.raises(MetricsError, match="expected"):
        wilson_interval(successes, n, confidence)


def test_success_table_counts_per_task_and_over_all():
    table = SuccessTable()
    for task, success in [("a", True), ("a", False), ("b", True), ("a", np.bool_(True))]:
        table.add(task, success)
    assert table.counts == {"a": (2, 3), "b": (1, 1)}
    assert table.total == (3, 4)
    assert table.rate == 0.75
    assert table.interval() == wilson_interval(3, 4)
    assert table.interval("b") == wilson_interval(1, 1)
    assert math.isnan(SuccessTable().rate)


def test_success_table_returns_from_its_json():
    table = SuccessTable({"a": (2, 3), "b": (0, 5)})
    data = json.loads(json.dumps(table.to_dict()))
    assert SuccessTable.from_dict(data).counts == table.counts
    assert data["rate"] == 0.25
    assert [data["low"], data["high"]] == list(wilson_interval(2, 8))


def test_success_table_prints_each_task_and_the_sum():
    lines = SuccessTable({"push": (2, 4), "pick up the milk": (0, 5)}).format().splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["push", "pick up the milk", "all"]
    assert "2/4" in lines[2] and "50.0%" in lines[2]
    assert "2/9" in lines[4] and "22.2%" in lines[4]
    assert len(SuccessTable({"push": (2, 4)}).format().splitlines()) == 3, "one task needs no sum"
    assert "no episode" in SuccessTable().format()


def test_success_table_refuses_more_successes_than_episodes():
    with pytest.raises(MetricsError, match="task 'a': 2 successes in 1"):
        SuccessTable().add("a", 2, 1)


def test_aggregate_gives_mean_min_and_max_and_nothing_for_nothing():
    assert aggregate("env/return", [1.0, 2.0, 6.0]) == {
        "env/return/mean": 3.0,
        "env/return/min": 1.0,
        "env/return/max": 6.0,
    }
    assert aggregate("env/return", []) == {}


@given(st.lists(st.floats(-50, 50), max_size=60))
def test_histogram_counts_every_value_once(values):
    counted = histogram("x", values, [-10, 0, 0.5, 10])
    assert sum(counted.values()) == len(values)
    assert counted["x/hist/0_to_0.5"] == sum(0 <= v < 0.5 for v in values)
    assert counted["x/hist/from_10"] == sum(v >= 10 for v in values)


def test_histogram_refuses_nan_and_disordered_edges():
    with pytest.raises(MetricsError, match="1 of 2 values are NaN"):
        histogram("x", [1.0, math.nan], [0, 1])
    with pytest.raises(MetricsError, match="strictly increasing"):
        histogram("x", [1.0], [1, 0])


def test_episode_metrics_give_rate_and_speed():
    metrics = episode_metrics([True, False, True, True], [1, 0, 1, 1], [10, 50, 20, 20], seconds=2.0)
    assert metrics["env/success_rate"] == 0.75
    assert metrics["env/episodes"] == 4
    assert metrics["env/steps_per_s"] == 50.0
    assert metrics["env/episode_length/max"] == 50
    assert "env/success_rate" not in episode_metrics([], [], [])


# ---------------------------------------------------------------- files


def test_metrics_come_back_as_plain_numbers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.log(1, {"a": np.float32(0.5), "b": torch.tensor(3), "c": True, "d": [np.int64(1), 2.0]})
    writer.log(2, {"a": math.nan, "b": math.inf})
    writer.close()
    first, second = read_metrics(tmp_path)
    assert (first["step"], first["a"], first["b"], first["c"], first["d"]) == (1, 0.5, 3, True, [1, 2.0])
    assert second["a"] is None and second["b"] is None, "JSON has no NaN: null marks a non-finite value"
    assert second["elapsed_s"] >= first["elapsed_s"] >= 0


def test_each_record_is_on_disk_before_the_next_begins(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.log(step, {"a": step})
        assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, step + 1)), "no close, no flush needed"


def test_metrics_refuse_what_is_no_number_and_name_the_key(tmp_path):
    with JsonlWriter(tmp_path / "x.jsonl") as writer:
        with pytest.raises(MetricsError, match=r"x\.jsonl\.actor/loss: Tensor"):
            writer.append({"actor/loss": torch.zeros(2)})
        with pytest.raises(MetricsError, match=r"x\.jsonl\.a\[1\]: object"):
            writer.append({"a": [1, object()]})
        writer.append({"a": 1})
    assert read_jsonl(tmp_path / "x.jsonl") == [{"a": 1}], "a refused record leaves no trace"


def test_a_kill_at_any_byte_loses_at_most_the_last_record(tmp_path):
    whole = tmp_path / "whole.jsonl"
    with JsonlWriter(whole) as writer:
        for step in range(3):
            writer.append({"step": step, "text": "völlig"})
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(data[:cut])
        complete = sum(end <= cut for end in ends)
        assert len(read_jsonl(torn)) - complete in (0, 1), "1 where only the line's end is missing"
        with JsonlWriter(torn) as writer:
            writer.append({"step": "after"})
        records = read_jsonl(torn)
        assert [r["step"] for r in records] == [*range(complete), "after"]


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2"):
        read_jsonl(path)
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_rows_that_a_resume_took_back_are_replaced(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3, 4):
        writer.log(step, {"run": "first"})
    writer.close()
    writer = MetricsWriter(tmp_path)  # resumed from the checkpoint of step 2
    writer.log(3, {"run": "second"})
    assert [(r["step"], r["run"]) for r in read_metrics(tmp_path)] == [(1, "first"), (2, "first"), (3, "second")]


def test_elapsed_time_goes_on_after_a_resume(tmp_path):
    with JsonlWriter(tmp_path / "metrics.jsonl") as file:
        file.append({"step": 1, "elapsed_s": 500.0})
    writer = MetricsWriter(tmp_path)
    writer.log(2, {})
    assert 500.0 <= read_metrics(tmp_path)[-1]["elapsed_s"] < 560.0


def _evaluation(step: int, successes: int, n: int = 10, mode: str = "ode", env: str = "maniskill") -> Evaluation:
    return Evaluation(step, env, mode, SuccessTable({"PickCube-v1": (successes, n)}), 100.0, 130.0)


def test_evaluations_come_back_and_the_last_of_a_kind_counts(tmp_path):
    writer = MetricsWriter(tmp_path)
    for evaluation in (_evaluation(0, 3), _evaluation(0, 2, mode="sde"), _evaluation(5, 6), _evaluation(5, 7)):
        writer.log_evaluation(evaluation)
    found = read_evaluations(tmp_path)
    assert [(e.step, e.mode, e.table.total) for e in found] == [
        (0, "ode", (3, 10)),
        (0, "sde", (2, 10)),
        (5, "ode", (7, 10)),
    ]
    assert found[0].ended - found[0].started == 30.0
    assert "elapsed_s" in found[0].extra


def test_an_evaluation_may_name_a_suite_and_a_broken_one_says_what_is_missing():
    record = {**_evaluation(3, 1).to_dict(), "suite": "libero_goal"}
    del record["env"]
    assert Evaluation.from_dict(record).env == "libero_goal"
    del record["tasks"]
    with pytest.raises(MetricsError, match="tasks"):
        Evaluation.from_dict(record)


def test_before_and_after_are_the_first_and_last_of_the_noise_free_policy_on_one_suite():
    evaluations = [
        _evaluation(0, 1, mode="sde"),
        _evaluation(0, 2),
        _evaluation(5, 5),
        _evaluation(9, 9),
        _evaluation(9, 0, env="other"),
    ]
    before, after = before_after(evaluations)
    assert (before.step, after.step, after.table.total) == (0, 9, (9, 10))
    assert before_after(evaluations[:2]) is None
    assert before_after([]) is None
    assert before_after([_evaluation(0, 0, n=0), _evaluation(1, 1)]) is None, (
        "an evaluation without episodes says nothing"
    )


def test_a_full_disk_loses_no_record_and_tears_none(tmp_path, capsys):
    """A file-size limit stands for the disk: records wait in memory and are there once it takes them again."""
    import resource
    import signal

    writer = JsonlWriter(tmp_path / "m.jsonl")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        for step in range(20):
            writer.append({"step": step, "text": "x" * 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [row["step"] for row in read_jsonl(writer.path)] == [0, 1], "whole lines alone"
    assert capsys.readouterr().err.count("records wait in memory") == 1
    writer.append({"step": 20, "text": ""})
    writer.close()
    assert [row["step"] for row in read_jsonl(writer.path)] == list(range(21))
