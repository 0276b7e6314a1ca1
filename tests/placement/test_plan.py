"""The planner: costs on paper by hand, what it refuses, what it prints, and how long it takes for 1,024 GPUs."""

import json
import shlex
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.cli import main
from vla3_plugin.placement.plan import candidates, config_of, estimate, format_plans, plan, scaled_down, settings_of
from vla3_plugin.placement.plan_costs import (
    Link,
    Sharding,
    flat_reduce_s,
    gradient_bytes_across,
    publish_s,
    reduce_s,
    replica_bytes,
    state_bytes,
    weight_bytes_across,
)
from vla3_plugin.placement.profile_file import EnvProfile, Hardware, PolicyProfile, Profile, read_profile
from vla3_plugin.placement.simulate import simulate
from vla3_plugin.placement.simulate_model import HostCosts
from vla3_plugin.placement.spec import Cluster, resolve

quick = partial(plan, simulated=4, chunk_steps=1500)


def profile(env_ms=200.0, train=(20.0, 10.0), gpu=False, memory=80.0, parameters=3e9, host=None, cores=112):
    policy = PolicyProfile(
        "pi0", int(parameters), int(parameters / 10), 4, (8.0, 4.0), (2.0, 0.1), train, 0.3, 20.0, 100_000
    )
    chunk = tuple(env_ms * (0.8 + 0.4 * i / 15) for i in range(16))
    env = EnvProfile("sim", chunk, 1.0 if gpu else env_ms, 0.0, 0.0 if gpu else env_ms, 10.0, 2.0, 0.02, gpu)
    return Profile(
        policy, env, Hardware("card", memory, cores, 2000.0, 450.0, 50.0), host or HostCosts(), micro_batch=8
    )


# ---------------------------------------------------------------- on paper


def test_training_state_is_sixteen_bytes_a_parameter_and_four_where_frozen():
    assert state_bytes(1e9, 1e9, 1) == 16e9
    assert state_bytes(1e9, 1e9, 8) == 2e9
    assert state_bytes(7e9, 1e8, 1) == 4 * 7e9 + 12 * 1e8
    assert replica_bytes(3e9) == 12e9 and replica_bytes(3e9, receiving=False) == 6e9


def test_collectives_by_hand():
    within, between = Link(100.0, 0.0), Link(10.0, 0.0)
    # 8 ranks: 7/8 of 4 bytes scattered and 2 gathered
    assert reduce_s(1e9, 1e9, Sharding(8, 8), within, between) == pytest.approx(7 / 8 * 6e9 / 100e9)
    # two cells of 4: 3/4 inside, and 2 * 1/2 of a quarter of the gradients across
    two = Sharding(8, 4)
    assert gradient_bytes_across(1e9, two) == pytest.approx(4e9 / 4)
    assert reduce_s(1e9, 1e9, two, within, between) == pytest.approx(3 / 4 * 6e9 / 100e9 + 1e9 / 10e9)
    assert flat_reduce_s(1e9, 1e9, 16, 8, within, between) == pytest.approx(15 / 16 * 6e9 / 10e9)
    assert flat_reduce_s(1e9, 1e9, 8, 8, within, between) == reduce_s(1e9, 1e9, Sharding(8, 8), within, between)
    with pytest.raises(ValueError, match="whole cells"):
        Sharding(8, 3)


def test_with_the_relay_weights_cross_once_a_node():
    assert weight_bytes_across(1e9, nodes=4, replicas=32) == 3 * 2e9
    assert weight_bytes_across(1e9, nodes=4, replicas=32, relay=False) == 24 * 2e9
    assert weight_bytes_across(1e9, nodes=1, replicas=8) == 0
    fast, slow = Link(100.0, 0.0), Link(10.0, 0.0)
    assert publish_s(1e9, 1, 8, fast, slow) == pytest.approx(2e9 / 100e9)
    assert publish_s(1e9, 4, 32, fast, slow) == pytest.approx(2e9 / 8 / 10e9 + 2e9 / 100e9)
    assert publish_s(1e9, 4, 32, fast, slow, relay=False) == pytest.approx(32 / 8 * 2e9 / 10e9)


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_more_cells_never_send_less_across_in_all_and_a_rank_never_more_than_twice_its_shard(cells, per_cell):
    sharding, more = Sharding(cells * per_cell, per_cell), Sharding((cells + 1) * per_cell, per_cell)
    assert gradient_bytes_across(1e9, sharding) <= 2 * 4e9 / per_cell
    assert gradient_bytes_across(1e9, sharding) * sharding.ranks <= gradient_bytes_across(1e9, more) * more.ranks


# ---------------------------------------------------------------- the planner


def test_it_answers_for_1024_gpus_in_under_twenty_seconds_and_names_what_limits():
    start = time.process_time()
    plans = plan(profile(), 1024, 128, seconds=120)  # of this machine's time, whatever else it does
    assert time.process_time() - start < 20, "processor time"
    best = plans[0]
    assert best.prediction is not None and best.limiting in ("env", "rollout", "learner")
    assert {p.candidate.mode for p in plans if p.prediction} == {"collocated", "disaggregated", "cells"}
    assert [p.samples_per_s for p in plans if p.prediction] == sorted(
        (p.samples_per_s for p in plans if p.prediction), reverse=True
    )
    layout = best.candidate.work.layout
    assert layout.devices == 1024 and layout.workers == layout.replicas


def test_a_dearer_learner_gets_more_of_the_devices():
    def learners(train):
        return quick(profile(train=train), 16, 2)[0].candidate.work.layout.ranks

    assert learners((0.0, 2.0)) < learners((0.0, 60.0))


def test_cores_bound_how_many_simulators_help():
    """With 8 cores a node, 64 processes take eight times as long each."""
    env = profile().env
    assert env.times(1, 64, 8).chunk_ms.mean_ms == pytest.approx(8 * env.times(1, 1, 8).chunk_ms.mean_ms)
    few, many = quick(profile(cores=8), 8)[0], quick(profile(cores=112), 8)[0]
    assert few.samples_per_s < many.samples_per_s and few.limiting == "env"


def test_what_fits_no_device_is_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=r"nothing fits: the leanest .* needs [\d.]+ GB of a device, of its 8 GB"):
        quick(profile(memory=8.0), 8)
    with pytest.raises(ValueError, match="10 GPUs in 4 nodes"):
        quick(profile(), 10, 4)


def test_a_shared_device_holds_learner_and_replica_together():
    """Nothing that the planner prints offloads one while the other works."""
    both = replica_bytes(3e9) + state_bytes(3e9, 3e8, 8)  # 12 GB and 2 GB
    assert min(c.device_gb for c in candidates(profile(), 8, 1, 64) if c.mode == "collocated") > both / 1e9


def test_a_collocated_plan_over_nodes_is_given_out_with_the_sharding_it_was_reckoned_with():
    shared = next(c for c in candidates(profile(), 16, 2, 128) if c.mode == "collocated")
    assert settings_of(shared)["actor_rollout_ref.actor.fsdp_config.fsdp_size"] == 8
    alone = next(c for c in candidates(profile(), 8, 1, 64) if c.mode == "collocated")
    assert "actor_rollout_ref.actor.fsdp_config.fsdp_size" not in settings_of(alone)


def test_a_part_of_a_large_cluster_stands_for_the_whole():
    """Half the cluster, measured alone and doubled, is the whole."""
    best = quick(profile(), 32, 4)[0].candidate.work
    small, factor = scaled_down(best, environments=best.layout.environments // 2)
    assert factor >= 2 and small.layout.replicas * factor == best.layout.replicas
    whole = simulate(best, steps=6).samples_per_s
    assert factor * simulate(small, steps=6).samples_per_s == pytest.approx(whole, rel=0.1)


def test_what_the_one_driver_does_for_every_sample_does_not_scale():
    """At 1 ms a sample nothing trains on more than 1,000 a second, however many devices there are."""
    slow_driver = HostCosts(prepare_ms_per_sample=1.0)
    assert quick(profile(host=slow_driver), 64, 8, episodes=256)[0].samples_per_s <= 1001
    assert quick(profile(), 64, 8, episodes=256)[0].samples_per_s > 1500


def _streamed(found, batch=64):
    return [c for c in candidates(found, 8, 1, batch) if c.work.schedule.streaming]


@pytest.mark.parametrize(
    "change, whole, statistics",
    [
        ({"mini_batches": 4}, True, "mini_batch"),
        ({"mini_batches": 4, "advantage_statistics": "previous"}, False, "previous"),
        ({"mini_batches": 4, "group_size": 8}, False, "previous"),  # a group's advantages are its own
        ({"mini_batches": 4, "group_size": 8, "adv_type": "gae"}, True, "mini_batch"),
        ({"mini_batches": 4, "normalize_advantages": False}, False, "previous"),
        ({"mini_batches": 1}, False, "previous"),
    ],
)
def test_a_streamed_plan_of_ppo_waits_for_whole_mini_batches_and_says_so_in_its_config(change, whole, statistics):
    for found in _streamed(profile().but(**change)):
        assert found.work.schedule.whole_mini_batches is whole
        assert settings_of(found)["vla3.algorithm.advantage_statistics"] == statistics


def test_simulators_share_the_cores_of_the_nodes_that_they_are_on():
    """Apart from the learner all 8 policy workers are on one node of two; in cells 4 on each."""
    few = profile(cores=8)
    alike = {}
    for found in candidates(few, 16, 2, 128):
        layout = found.work.layout
        if (layout.ranks, layout.shards, layout.slots) == (8, 8, 1) and not layout.shared:
            alike[found.mode] = found.work.env.chunk_ms.mean_ms
    assert alike["disaggregated"] == pytest.approx(2 * alike["cells"])
    room = few.but(hardware=replace(few.hardware, host_memory_gb=60.0))  # 54 may be planned, of 2 GB a simulator
    most = {mode: max(c.work.layout.shards for c in candidates(room, 16, 2, 128) if c.mode == mode
                      and c.work.layout.ranks == 8) for mode in ("disaggregated", "cells")}  # fmt: skip
    assert most == {"disaggregated": 2, "cells": 4}


def test_a_plan_names_its_cluster_and_takes_back_what_a_recipe_says_against_it():
    for found in candidates(profile(), 16, 2, 128):
        settings = settings_of(found)
        assert settings["vla3.placement.node_gpus"] == [8, 8]
        assert settings["vla3.env.pipeline_stage_num"] <= found.work.layout.shards
        if found.mode == "collocated":
            assert settings["vla3.placement.ratio"] is None
            assert settings["actor_rollout_ref.rollout.checkpoint_engine.backend"] == "vla3_gloo"


@pytest.mark.parametrize("gpus, nodes", [(4, 1), (8, 2)])
def test_a_config_that_was_pasted_into_a_recipe_is_placed_as_it_was_planned(gpus, nodes):
    """Into one that has a ratio, nccl and a pipeline of its own, as recipes for GPUs do."""
    import verl  # noqa: F401  loads the plugin

    from vla3_plugin.cli_placement import compose_recipe
    from vla3_plugin.config import parse
    from vla3_plugin.placement import resolve as run

    recipes = ["vla3.placement.ratio='rollout:actor = 1:1'", "vla3.env.pipeline_stage_num=2",
               "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"]  # fmt: skip
    seen = set()
    for found in candidates(profile(), gpus, nodes, 8 * gpus):
        layout = found.work.layout
        kind = (found.mode, layout.ranks, found.work.schedule.streaming)
        if kind in seen:
            continue
        seen.add(kind)
        config = compose_recipe("vla3_maniskill_sync", [*recipes, *shlex.split(" ".join(config_of(found)))])
        vla3 = parse(config.vla3)
        placement, faults = run.place(config, vla3)
        assert faults == [], (kind, faults)
        assert len(placement.components["actor"]) == layout.ranks
        assert len(placement.components["rollout"]) == layout.replicas
        assert placement.cluster.gpus == (gpus // nodes,) * nodes


def test_every_mini_batch_pays_for_its_reduction():
    dear = profile(host=HostCosts(reduce_ms=2000.0))
    four = dear.but(mini_batches=4)
    assert max(estimate(c.work) for c in _streamed(four)) < 0.6 * max(estimate(c.work) for c in _streamed(dear))
    assert quick(four, 8)[0].samples_per_s < 0.6 * quick(dear, 8)[0].samples_per_s


def test_no_plan_has_more_mini_batches_than_groups_whole_or_scaled_down():
    many = profile().but(mini_batches=24)
    for found in candidates(many, 8, 1, 16):
        assert settings_of(found)["vla3.algorithm.num_mini_batches"] == 16
    for found in _streamed(many, batch=64):
        small, _ = scaled_down(found.work, environments=1)
        assert small.schedule.groups_per_step >= small.schedule.mini_batches == 24


@pytest.mark.parametrize("gpu", [False, True])
def test_the_closed_form_is_near_the_simulation_that_it_chooses_candidates_for(gpu):
    for found in quick(profile(gpu=gpu, env_ms=150.0), 8):
        if found.prediction is not None and found.candidate.mode == "disaggregated":
            assert estimate(found.candidate.work) == pytest.approx(found.samples_per_s, rel=0.5)


def test_the_command_prints_a_table_and_the_config_to_paste(tmp_path, capsys):
    path = tmp_path / "profile.json"
    profile().save(path)
    assert main(["plan", "--profile", str(path), "--gpus", "8", "--seconds", "2", "--episodes", "64"]) == 0
    text = capsys.readouterr().out
    assert "limited by" in text and "vla3.stages.interaction.enabled=" in text and "data.train_batch_size=64" in text
    assert main(["plan", "--profile", str(path), "--gpus", "8", "--seconds", "1", "--json", "--show", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3 and found[0]["config"] and found[0]["layout"]["replicas"] >= 1
    assert main(["plan", "--profile", str(tmp_path / "none.json"), "--gpus", "8"]) == 2
    assert "make one with vla3 profile" in capsys.readouterr().err


def test_the_config_to_paste_is_one_that_the_schema_knows():
    from omegaconf import OmegaConf

    from vla3_plugin.config import VLA3Config, parse

    for found in quick(profile(), 16, 2)[:12]:
        mine = [o.strip("'") for o in found.to_dict()["config"] if o.strip("'").startswith("vla3.")]
        tree = OmegaConf.from_dotlist([o.removeprefix("vla3.").replace('"', "") for o in mine])
        parsed = parse(tree)
        assert isinstance(parsed, VLA3Config)
        assert parsed.env.workers == found.candidate.work.layout.workers


def test_plans_are_printed_best_first():
    text = format_plans(quick(profile(), 8), shown=5).splitlines()
    assert text[1].split()[0] == "1" and len([line for line in text if line[:2].strip().isdigit()]) == 5


# ---------------------------------------------------------------- the file


def test_a_profile_survives_its_file(tmp_path):
    made = profile(host=HostCosts(batch_ms=1.5))
    made.save(tmp_path / "p.json")
    again = read_profile(tmp_path / "p.json")
    assert again == made


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d: d.update(format=9), "format 9, expected 1"),
        (lambda d: d["policy"].update(speed=1), "policy.speed: unknown"),
        (lambda d: d["env"].pop("chunk_ms"), "env: missing 1 required positional argument: 'chunk_ms'"),
        (lambda d: d.update(host=3), "host: 3, expected a mapping"),
        (lambda d: d["host"].update(batch_ms=-1), "host.batch_ms: -1"),
        (lambda d: d.update(group_size=0), "p.json.group_size: 0, expected a whole number"),
        (lambda d: d.update(mini_batches="4"), "mini_batches: '4', expected a whole number"),
        (lambda d: d.update(advantage_statistics="batches"), "'batches', expected one of batch, mini_batch, previous"),
    ],
)
def test_a_damaged_profile_is_refused_by_field(tmp_path, change, said):
    data = profile().to_json()
    data = json.loads(json.dumps(data))
    change(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=said):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("gpus, nodes", [(8, 1), (16, 2), (64, 8), (6, 2), (6, 3), (9, 1)])
def test_every_plan_can_be_placed_with_as_many_learner_ranks_on_each_of_its_nodes(gpus, nodes):
    cluster, seen = Cluster((gpus // nodes,) * nodes), set()
    for found in candidates(profile(), gpus, nodes, 8 * gpus):
        layout, mode = found.work.layout, found.mode
        if (layout.ranks, mode) in seen:
            continue
        seen.add((layout.ranks, mode))
        ratio = settings_of(found)["vla3.placement.ratio"]
        placed = resolve(cluster, mode="collocated" if layout.shared else "disaggregated", ratio=ratio,
                         ratio_per_node=mode == "cells")  # fmt: skip
        counts = Counter(p.node for p in placed.components["actor"])
        assert sum(counts.values()) == layout.ranks and len(set(counts.values())) == 1
        assert len(placed.components["rollout"]) == layout.replicas
    assert len(seen) >= 2
