"""The bound of a latency preset, against queues whose throughput is known, and the presets that ship."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from vla3_plugin.envs.latency import LatencyEnv
from vla3_plugin.envs.latency_draw import Duration
from vla3_plugin.policies.latency import LatencyPolicy
from vla3_plugin.resources import resource_dir

_spec = importlib.util.spec_from_file_location("vla3_bound", Path(__file__).parents[2] / "benchmarks" / "bound.py")
assert _spec is not None and _spec.loader is not None
bound = importlib.util.module_from_spec(_spec)
sys.modules["vla3_bound"] = bound
_spec.loader.exec_module(bound)

PRESETS = sorted(path.stem for path in (resource_dir("configs") / "latency").glob("*.yaml"))


def preset(options: dict, env: dict, model: dict, micro: int = 10) -> dict:
    return {
        "vla3": {
            "env": {"workers": 1, "options": options, **env},
            "algorithm": {"adv_type": "grpo"},
            "stages": {"interaction": {"max_batch_size": 8}},
        },
        "actor_rollout_ref": {"model": {"options": model}, "actor": {"ppo_micro_batch_size_per_gpu": micro}},
    }


def test_one_simulator_and_one_policy_take_turns():
    found = bound.bound(preset({"chunk_ms": 90}, {"shards_per_worker": 1}, {"prefix_ms_base": 6, "step_ms_base": 1}))
    assert found["bound"] == pytest.approx(1000 / 90, abs=0.01)
    assert found["closed_loop"] == pytest.approx(10, abs=0.01)
    assert found["simulated"] == {"run_to_completion": pytest.approx(10), "step_join": pytest.approx(10)}


def test_each_resource_alone_is_what_its_numbers_say():
    model = {"prefix_ms_base": 8, "prefix_ms_per_sample": 1, "train_ms_base": 20, "train_ms_per_sample": 4}
    options = {"chunk_ms": 90, "per": "shard", "chunk_ms_per_env": 5, "reset_ms": 10, "episode_chunks": 4}
    found = bound.bound(preset(options, {"shards_per_worker": 2, "envs_per_shard": 8}, model), simulate_steps=0)
    assert found["ms_per_step"] == {"envs": (90 + 40 + 8 * 10 / 4) / 16, "inference": 16 / 8, "learner": (20 + 40) / 10}
    assert found["binding"] == "envs" and found["bound"] == pytest.approx(1000 * 16 / 150, abs=0.01)
    again = bound.bound(preset(options, {}, model), forward_passes=1, simulate_steps=0)
    assert again["ms_per_step"]["learner"] == pytest.approx(8)


def test_the_learner_can_bind():
    found = bound.bound(preset({"chunk_ms": 10}, {"shards_per_worker": 4}, {"train_ms_per_sample": 50}))
    assert found["binding"] == "learner" and found["bound"] == 20
    assert found["closed_loop"] == 20 and found["simulated"]["run_to_completion"] == 20


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("chunk_ms", [20, 100, 400])
def test_no_simulated_schedule_beats_the_closed_loop(name, chunk_ms):
    """Also where inference binds; 3% for the draws of a finite run."""
    work = replace(bound.read(name), chunk=Duration(chunk_ms, 0.4))
    for step_join in (False, True):
        assert bound.simulate(work, step_join, 6000) <= 1.03 * bound.closed_loop(work)


def test_the_peers_workload_is_the_one_that_was_measured():
    """The figures beside the peer's measurements: about 70 steps a second to reach, 107 from the trainer."""
    work, found = bound.read("peer-reference"), bound.bound("peer-reference")
    assert work.chunk.mean_ms == pytest.approx(144, abs=1)
    for count, slowest in ((4, 244), (8, 303), (16, 366)):
        assert work.chunk.mean_of_max_ms(count) == pytest.approx(slowest, rel=0.01)
    assert work.policy.inference_ms(16) == 40 + 4 * 16 and work.policy.train_ms(320) == 3000
    assert found["binding"] == "learner" and found["bound"] == pytest.approx(106.7, abs=0.1)
    assert found["simulated"]["run_to_completion"] == pytest.approx(70, abs=2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_complete_and_accepted_by_environment_and_policy(name):
    merged = OmegaConf.merge(
        OmegaConf.load(resource_dir("configs") / "env" / "latency.yaml"),
        OmegaConf.load(resource_dir("configs") / "latency" / f"{name}.yaml"),
    )
    env = LatencyEnv(**OmegaConf.to_container(merged.vla3.env.options, resolve=True))
    policy = LatencyPolicy.build(
        "latency", **OmegaConf.to_container(merged.actor_rollout_ref.model.options, resolve=True)
    )
    policy.check_env(env.spec)
    assert merged.data.train_batch_size >= 1 and bound.read(name).max_batch >= bound.read(name).slots


@pytest.mark.parametrize("name", ["cpu-sim-long-tail", "fast-learner", "gpu-sim-batched", "slow-learner"])
def test_a_presets_bound_is_within_reach(name):
    """Otherwise an efficiency would measure the preset and not the plugin."""
    found = bound.bound(name, simulate_steps=6000)
    assert found["simulated"]["run_to_completion"] > 0.96 * found["bound"]


def test_an_unknown_preset_lists_what_there_is():
    with pytest.raises(ValueError, match="preset 'peer'.*known: .*peer-reference"):
        bound.bound("peer")


def test_a_workload_that_takes_no_time_has_no_bound():
    with pytest.raises(ValueError, match="nothing bounds them"):
        bound.bound(preset({"chunk_ms": 0}, {}, {}))
