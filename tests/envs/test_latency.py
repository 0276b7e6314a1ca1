"""The latency emulator's environment: durations belong to the episode, take no processor, and depend on no schedule."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from vla3_plugin.contract import Episode
from vla3_plugin.envs import latency
from vla3_plugin.envs.check import check_env
from vla3_plugin.envs.latency import LatencyEnv
from vla3_plugin.envs.latency_draw import Duration, parse_duration
from vla3_plugin.envs.registry import make_env

TAIL = {"kind": "lognormal", "median_ms": 100, "sigma": 0.6}


def episode(index: int, seed: int | None = None) -> Episode:
    return Episode(index, 0, 0, 1000 + index if seed is None else seed, index)


@pytest.fixture
def slept(monkeypatch):
    """Durations in ms instead of sleep."""
    durations: list[float] = []
    monkeypatch.setattr(latency, "_sleep_until", lambda start, ms: durations.append(ms))
    return durations


def play(env: LatencyEnv, slot: int, which: Episode, action: float = 0.0) -> list:
    env.reset(slot, which)
    results = []
    while not results or not results[-1].done:
        results += env.chunk_step([slot], np.full((1, 8, 7), action, np.float32))
    return results


# durations


def test_an_episode_takes_the_same_time_in_any_slot_order_and_company(slept):
    alone = LatencyEnv(chunk_ms=TAIL, reset_ms=TAIL, episode_chunks=4)
    play(alone, 0, episode(7))
    expected = list(slept)
    slept.clear()
    shared = LatencyEnv(num_slots=2, chunk_ms=TAIL, reset_ms=TAIL, episode_chunks=4)
    play(shared, 1, episode(3))
    slept.clear()
    play(shared, 1, episode(7), action=0.9)  # other actions take no other time
    assert slept == expected and len(set(expected)) == 5


def test_a_vector_of_environments_takes_as_long_as_its_slowest(slept):
    actions = np.zeros((3, 8, 7), np.float32)
    apart, together = (LatencyEnv(num_slots=3, chunk_ms=TAIL) for _ in range(2))
    for i in range(3):
        apart.reset(i, episode(i))
        together.reset(i, episode(i))
    slept.clear()
    for i in range(3):
        apart.chunk_step([i], actions[:1])
    together.chunk_step([2, 0, 1], actions)
    assert len(set(slept[:3])) == 3 and slept[3] == max(slept[:3])


def test_a_batched_shard_takes_longer_the_more_environments_step_whatever_their_order(slept):
    env = LatencyEnv(num_slots=4, chunk_ms=TAIL, per="shard", chunk_ms_per_env=5)
    for i in range(4):
        env.reset(i, episode(i))
    slept.clear()
    for slots in ([0, 1], [1, 0], [3, 0, 2, 1]):
        for i in range(4):
            env.reset(i, episode(i))
        env.chunk_step(slots, np.zeros((len(slots), 8, 7), np.float32))
    pair, turned, four = [ms for ms in slept if ms]
    assert pair == turned and four == pytest.approx(pair + 2 * 5)


def test_members_of_a_group_share_the_start_and_neither_durations_nor_fates(slept):
    env = LatencyEnv(chunk_ms=TAIL, episode_chunks={"low": 2, "high": 6}, success=0.5)
    starts, runs = [], []
    for i in range(16):
        starts.append(env.reset(0, episode(i, seed=5)).state)
        slept.clear()
        runs.append(play(env, 0, episode(i, seed=5)))
    assert all(np.array_equal(starts[0], start) for start in starts)
    assert {run[-1].success for run in runs} == {True, False}
    assert len({len(run) for run in runs if run[-1].success}) > 1
    assert all(len(run) == 6 and run[-1].truncated.any() for run in runs if not run[-1].success)
    assert all(run[-1].terminated.any() for run in runs if run[-1].success)


def test_a_step_in_a_process_takes_its_time_and_no_processor():
    with make_env("latency", {"chunk_ms": 60, "image_size": 64}, num_slots=2) as env:
        for slot in range(2):
            env.reset(slot, episode(slot))
        child = psutil.Process(env.process.pid)
        before, start = child.cpu_times(), time.perf_counter()
        for _ in range(10):
            env.chunk_step([0, 1], np.zeros((2, 8, 7), np.float32))
        elapsed, after = time.perf_counter() - start, child.cpu_times()
    assert elapsed >= 0.6
    assert (after.user + after.system) - (before.user + before.system) < 0.1, "10 steps of 60 ms"


# the contract and the task


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_slots": 3, "cameras": 2, "tasks": 2},
        {"num_slots": 2, "per": "shard", "episode_chunks": {"low": 1, "high": 3}, "success": 1.0},
        {"success": 0.0, "episode_chunks": {"low": 2, "high": 3}},
    ],
)
def test_it_follows_the_contract(options):
    remarks = check_env(LatencyEnv(**{"chunk_ms": 0, **options}))
    assert all("one slot" in r or "no expert" in r or "ended by itself" in r for r in remarks), remarks


def test_acting_like_the_goal_pays_and_changes_nothing_else():
    env = LatencyEnv(chunk_ms=0, episode_chunks=3, success=0.0)
    goal = env.reset(0, episode(1)).state[:7]
    returns = []
    for action in (goal, -goal):
        env.reset(0, episode(1))
        chunks = [env.chunk_step([0], np.tile(action, (1, 8, 1)))[0] for _ in range(3)]
        assert chunks[-1].truncated[-1] and not chunks[-1].success
        returns.append(sum(float(c.rewards.sum()) for c in chunks))
    assert returns[0] == pytest.approx(0.5) and returns[1] < returns[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_ms": {"kind": "normal"}}, r"vla3.env.options.chunk_ms: .*expected a number of ms"),
        ({"chunk_ms": {"kind": "lognormal", "median_ms": 3}}, "chunk_ms"),
        ({"chunk_ms": -1}, "chunk_ms: -1, expected a finite number"),
        ({"chunk_ms": "fast"}, "chunk_ms: 'fast'"),
        ({"chunk_ms": {"kind": "empirical", "samples_ms": []}}, "non-empty"),
        ({"chunk_ms": {"kind": "empirical", "samples_ms": [3, "x"]}}, r"samples_ms\[1\]: 'x'"),
        ({"chunk_ms": {"kind": "empirical", "file": "/nowhere"}}, "chunk_ms.file: '/nowhere' is not readable"),
        ({"reset_ms": float("nan")}, "reset_ms: nan"),
        ({"per": "worker"}, "per: 'worker', expected env or shard"),
        ({"chunk_ms_per_env": 3}, "chunk_ms_per_env: 3, expected at least 0, and 0 where per is env"),
        ({"episode_chunks": {"low": 5, "high": 3}}, "episode_chunks"),
        ({"episode_chunks": 0}, "episode_chunks: 0"),
        ({"success": 1.5}, "success: 1.5, expected a probability"),
        ({"state_dim": 10}, "state_dim: 10, expected a whole number, at least 15"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        LatencyEnv(**options)


def test_it_needs_numpy_alone():
    code = (
        "import sys, vla3_plugin.envs.latency; "
        "print([m for m in ('torch', 'ray', 'verl', 'omegaconf') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# distributions


def test_lognormal_durations_have_the_median_and_the_mean_they_say():
    duration = parse_duration(TAIL, "x")
    draws = np.array([duration.draw(1, i) for i in range(20_000)])
    assert np.median(draws) == pytest.approx(100, rel=0.03)
    assert draws.mean() == pytest.approx(duration.mean_ms, rel=0.03) and duration.mean_ms == pytest.approx(
        119.7, abs=0.1
    )


@pytest.mark.parametrize("duration", [Duration(100, 0.6), Duration(5, samples_ms=(1.0, 5.0, 60.0))])
def test_the_expected_slowest_is_what_draws_give(duration):
    draws = np.array([duration.draw(2, i) for i in range(32_000)]).reshape(-1, 8).max(1)
    assert duration.mean_of_max_ms(8) == pytest.approx(draws.mean(), rel=0.03)
    assert duration.mean_of_max_ms(1) == duration.mean_ms


@pytest.mark.parametrize("text", ["[30, 10.5, 20]", "30\n10.5\n20\n"])
def test_measured_durations_come_from_a_file(tmp_path, text):
    file = tmp_path / "measured.txt"
    file.write_text(text)
    duration = parse_duration({"kind": "empirical", "file": str(file)}, "x")
    counts = np.unique([duration.draw(3, i) for i in range(3000)], return_counts=True)
    assert counts[0].tolist() == [10.5, 20.0, 30.0] and min(counts[1]) > 850
    assert duration == parse_duration({"kind": "empirical", "samples_ms": [10.5, 20, 30]}, "x")


def test_a_constant_is_a_number_or_says_so():
    assert parse_duration(12, "x") == parse_duration({"kind": "constant", "ms": 12}, "x") == Duration(12.0)
    assert json.dumps(Duration(12.0).draw(1)) == "12.0"
