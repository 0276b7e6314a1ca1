"""Measuring: lines through points, a policy and a simulator whose times are known, host costs out of a run's spans."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.envs.latency import LatencyEnv
from vla3_plugin.placement.profile_host import Run, Span, host_costs, host_points, line, read_trace
from vla3_plugin.placement.profile_measure import fit, hardware, measure_env, measure_policy, versions
from vla3_plugin.placement.simulate_model import EnvTimes, HostCosts, Layout, Schedule, Workload
from vla3_plugin.policies.latency import LatencyPolicy, LatencySettings


@given(st.floats(0, 50), st.floats(0.01, 10))
def test_a_line_is_found_again(base, slope):
    sizes = [1, 2, 4, 8, 16]
    (b, s), residual = fit([[1.0, n] for n in sizes], [base + slope * n for n in sizes])
    assert (b, s) == pytest.approx((base, slope), abs=1e-6) and residual < 1e-6


def test_no_part_of_a_line_is_negative_and_the_residual_says_what_it_does_not_fit():
    (base, slope), residual = fit([[1.0, n] for n in (1, 2, 4)], [1.0, 4.0, 16.0])
    assert base == 0 and slope > 0 and residual > 0.3
    assert line([(1.0, 5.0), (10.0, 2.0)]) == (3.5, 0.0), "falling: the median"
    assert line([]) == (0.0, 0.0) and line([(4.0, 2.0)]) == (2.0, 0.0)


def simulator(index, slots):
    return LatencyEnv(slots, chunk_ms=8.0, per="shard", chunk_ms_per_env=2.0, episode_chunks=4, image_size=8)


def test_a_policy_and_a_simulator_of_known_times_are_measured_as_such():
    env, observation = measure_env("latency", simulator, [1, 2], [1, 4], chunk=8, seconds=0.15)
    policy = LatencyPolicy(LatencySettings(
        denoising_steps=2, prefix_ms_base=6.0, prefix_ms_per_sample=1.0, step_ms_base=4.0, step_ms_per_sample=0.5,
        train_ms_base=3.0, train_ms_per_sample=2.0,
    ))  # fmt: skip
    found = measure_policy(policy, observation, [1, 4, 12], [2, 8], seconds=0.05)
    busy = 6.0  # ms that a machine busy elsewhere may add to anything
    assert found.prefix_ms[0] == pytest.approx(6.0, abs=busy) and found.prefix_ms[1] == pytest.approx(1.0, abs=0.6)
    assert found.step_ms[0] == pytest.approx(4.0, abs=busy) and found.step_ms[1] == pytest.approx(0.5, abs=0.5)
    assert found.train_ms[1] == pytest.approx(2.0, abs=0.8)
    assert found.denoising_steps == 2 and 0 < found.forward_share <= 1 and found.publish_ms > 0
    assert found.sample_bytes >= 8 * 8 * 3 + 4 * 42
    assert found.settings.inference_ms(4) == pytest.approx(6 + 4 + 2 * (4 + 2), abs=3 * busy)
    assert min(env.chunk_ms) >= 9.9 and env.per_env_ms == pytest.approx(2.0, abs=1.5)
    assert env.mean_chunks == 4 and [p[:2] for p in env.points["chunk"]] == [[1, 1], [1, 4], [2, 1], [2, 4]]


def test_inference_is_measured_with_the_policy_workers_threads_and_training_with_the_learners():
    import torch

    before, used = torch.get_num_threads(), {"begin": set(), "forward": set()}

    class Noting(LatencyPolicy):
        def begin(self, *args, **kwargs):
            used["begin"].add(torch.get_num_threads())
            return super().begin(*args, **kwargs)

        def forward(self, *args, **kwargs):
            used["forward"].add(torch.get_num_threads())
            return super().forward(*args, **kwargs)

    _, observation = measure_env("latency", simulator, [1], [1, 2], chunk=8, seconds=0.01)
    try:
        measure_policy(Noting(LatencySettings()), observation, [1, 2], [1, 2], seconds=0.01, threads=(2, 1))
    finally:
        torch.set_num_threads(before)
    assert used == {"begin": {2}, "forward": {1}}


def test_one_batch_size_gives_no_line():
    with pytest.raises(ValueError, match="at least two different sizes"):
        measure_policy(None, None, [4], [2, 8])


def test_the_profile_names_versions_and_hardware_and_nobody():
    import getpass
    import platform

    text = json.dumps([versions(), hardware().__dict__])
    assert "torch" in text and hardware().cores >= 1
    assert platform.node() not in text and f"/{getpass.getuser()}" not in text


# ---------------------------------------------------------------- host costs


def synthetic_run():
    """Spans of a lock-step run whose costs are known: 5 ms + 0.5 a row a call, 1 ms a batch, 4 ms an episode, ..."""
    policy = LatencySettings(prefix_ms_base=10.0, denoising_steps=1, train_ms_per_sample=1.0)
    work = Workload(EnvTimes(__import__("vla3_plugin.envs.latency_draw", fromlist=["Duration"]).Duration(50.0)), policy,
                    Layout(shards=4), Schedule(train_batch_size=4, micro_batch=8))  # fmt: skip
    lanes = {("env0", "shard 0"): {"wait:batch": [], "chunk_step": [], "wait:data": []},
             ("policy0", "inference"): {"batch": []},
             ("driver", "step"): {"wait:data": [], "advantages": [], "update": []},
             ("driver", "publication"): {"publish": []}, ("actor0", "gradient"): {"update": []}}  # fmt: skip
    now = 0.0
    for _ in range(6):
        lanes["driver", "step"]["wait:data"].append(Span(now, 300.0, {}))
        lanes["env0", "shard 0"]["wait:data"].append(Span(now - 20, 22.0, {}))
        at = now + 2.0
        for chunk in range(3):
            call = 5.0 + 0.5 * 4 + 11.0
            lanes["env0", "shard 0"]["wait:batch"].append(Span(at, call, {"requests": 4}))
            lanes["policy0", "inference"]["batch"].append(Span(at + 3, 11.0, {"size": 4}))
            at += call
            if chunk < 2:
                lanes["env0", "shard 0"]["chunk_step"].append(Span(at, 50.0, {"envs": 4}))
                at += 50.0
        at += 4 * 4.0  # four episodes delivered; the next span of the shard is its wait for data
        lanes["driver", "step"]["advantages"].append(Span(at, 12.0, {}))
        lanes["driver", "step"]["update"].append(Span(at + 12, 40.0, {}))
        lanes["actor0", "gradient"]["update"].append(Span(at + 20, 14.0, {"samples": 8}))
        lanes["driver", "publication"]["publish"].append(Span(at + 52, 9.0, {}))
        now = at + 61 + 7.0
    lanes["env0", "shard 0"]["wait:data"] = [
        Span(s.start, s.ms, {}) for s in lanes["env0", "shard 0"]["wait:data"][1:]
    ]  # fmt: skip
    return Run(work, lanes, [{"rollout/chunk_steps": 8.0}] * 6)


def test_costs_are_read_out_of_spans():
    found = host_points(synthetic_run())
    assert found["request_ms"] == [(4.0, 7.0)] and found["batch_ms"] == [(0, 1.0)]
    assert found["update_ms"] == [(8.0, 26.0)] and found["micro_ms"] == [(0, 6.0)]
    assert found["publish_ms"] == [(0, 9.0)] and found["step_ms"] == [(0, 7.0)] and found["assign_ms"] == [(0, 2.0)]
    costs = host_costs([host_points(synthetic_run())])
    assert isinstance(costs, HostCosts) and costs.batch_ms == 1.0 and costs.publish_ms == 9.0
    with pytest.raises(ValueError, match="no runs"):
        host_costs([])


def test_a_trace_that_was_cut_off_is_read_up_to_there(tmp_path):
    meta = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "driver"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 5, "args": {"name": "step"}}]  # fmt: skip
    spans = [{"ph": "X", "name": "update", "pid": 1, "tid": 5, "ts": 1000.0 * i, "dur": 500.0} for i in range(3)]
    text = "[\n" + "".join(json.dumps(e) + ",\n" for e in meta + spans) + '{"ph": "X", "na'
    (tmp_path / "trace.json").write_text(text)
    lanes = read_trace(tmp_path / "trace.json")
    assert [s.start for s in lanes["driver", "step"]["update"]] == [0.0, 1.0, 2.0]
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match="no spans"):
        read_trace(tmp_path / "empty.json")


def test_measuring_takes_about_as_long_as_it_was_given():
    from vla3_plugin.placement.profile_measure import median_ms

    start = time.perf_counter()
    assert median_ms(lambda: time.sleep(0.002), 0.05) >= 2.0
    assert time.perf_counter() - start < 5
