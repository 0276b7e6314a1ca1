"""The closed forms, and the simulation where they are exact: constant times, one clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.envs.latency_draw import Duration
from vla3_plugin.placement.closed_forms import bounds, d_vla, overlapping, t_1, t_2
from vla3_plugin.placement.simulate import simulate
from vla3_plugin.placement.simulate_model import EnvTimes, Layout, Schedule, Workload
from vla3_plugin.policies.latency import LatencySettings


def constant(env=100.0, base=20.0, row=1.0, train=2.0, chunks=5, shards=8, bootstrap=False, **schedule):
    return Workload(
        EnvTimes(Duration(env), low=chunks, high=chunks),
        LatencySettings(prefix_ms_base=base, prefix_ms_per_sample=row, denoising_steps=1, train_ms_per_sample=train),
        Layout(shards=shards),
        Schedule(train_batch_size=shards, micro_batch=4, bootstrap=bootstrap, max_batch_size=shards, **schedule),
    )


@given(st.floats(1, 300), st.floats(1, 50), st.floats(0, 4), st.floats(0, 10), st.integers(1, 6), st.booleans())
def test_one_clock_with_constant_times_is_t_1(env, base, row, train, chunks, bootstrap):
    work = constant(env, base, row, train, chunks, bootstrap=bootstrap)
    assert simulate(work, steps=2, warmup=1).step_s == pytest.approx(t_1(work).step_s, rel=1e-9)


def test_t_1_by_hand():
    work = constant()
    assert t_1(work).step_s == pytest.approx((5 * (100 + 28) + 40 * 2) / 1e3)
    assert t_1(work).samples_per_s == pytest.approx(40 / 0.720)


def test_t_2_is_the_longer_stage_k_times_and_the_shorter_once():
    """Simulator 100, policy 20 + 4 rows: 100 x 1 + 100 + 24 a round."""
    work = constant(pipeline_stage_num=2)
    assert t_2(work).rollout_s == pytest.approx(5 * (100 + 100 + 24) / 1e3)
    assert t_2(work, stages=1).rollout_s == pytest.approx(t_1(work).rollout_s)


@pytest.mark.parametrize("env, base", [(100.0, 20.0), (10.0, 60.0)])
def test_two_stages_with_simulators_of_their_own_take_what_overlapping_says_and_a_start_up(env, base):
    work = constant(env, base, pipeline_stage_num=2)
    found, form = simulate(work, steps=2, warmup=1).step_s, overlapping(work).step_s
    start_up = work.policy.inference_ms(4) / 1e3 + env / 1e3
    assert form <= found + 1e-9 and found <= form + start_up


def test_decoupled_training_takes_the_longer_of_rollout_and_actor():
    """A lock-step rollout that may run one step ahead: D-VLA's form, exactly, on constant times."""
    for train in (2.0, 40.0):
        work = constant(train=train, training=True, max_staleness=1, recompute=False)
        assert simulate(work, steps=6, warmup=4).step_s == pytest.approx(d_vla(work).step_s, rel=0.02)


def test_bounds_by_hand():
    found = bounds(constant(interaction=True, bootstrap=True))
    assert found["env"] == pytest.approx(8 / 0.1)
    assert found["rollout"] == pytest.approx(8 / 0.028 / (1 + 1 / 5))
    assert found["learner"] == pytest.approx(1 / 0.002)
