"""``vla3.placement.mode: auto``: the planner's choice at start, set, said and kept."""

import json
import re
from dataclasses import replace

import pytest
import verl  # noqa: F401  loads the plugin
from omegaconf import OmegaConf

from vla3_plugin.cli_placement import compose_recipe
from vla3_plugin.config import parse
from vla3_plugin.config_checks import contradictions
from vla3_plugin.placement import auto, memory, resolve
from vla3_plugin.placement.profile_file import EnvProfile, Hardware, PolicyProfile, Profile


def profile(name="maniskill", env_ms=50.0, train_ms=10.0):
    policy = PolicyProfile("pi0", 3_000_000, 3_000_000, 4, (8.0, 3.0), (2.0, 0.5), (20.0, train_ms), 0.3, 20.0, 100_000)
    chunk = tuple(env_ms * (0.8 + 0.4 * i / 15) for i in range(16))
    env = EnvProfile(name, chunk, env_ms, 0.0, env_ms, 6.0, 0.8, 0.01)
    return Profile(policy, env, Hardware("cpu", 24.0, 8, 64.0))


@pytest.fixture
def compose(tmp_path, monkeypatch):
    """A composed config and its parsed part, on a machine with room, whatever else this one does."""
    monkeypatch.setattr(memory, "available_memory", lambda: memory.AvailableMemory(64 * 2**30, "machine"))

    def make(*overrides, file=None):
        (file or profile()).save(tmp_path / "profile.json")
        config = compose_recipe(
            "vla3_maniskill",
            ["vla3.placement.mode=auto", f"vla3.placement.profile={tmp_path}/profile.json",
             f"vla3.run_dir={tmp_path}/run", *overrides],
        )  # fmt: skip
        (tmp_path / "run").mkdir(exist_ok=True)
        return config, parse(OmegaConf.select(config, "vla3"))

    return make


@pytest.mark.parametrize(
    ("overrides", "file", "message"),
    [
        (["vla3.placement.profile=null"], None, "vla3.placement.profile: null.*vla3 profile --recipe"),
        (["vla3.placement.mode=collocated"], None, "profile says nothing without vla3.placement.mode=auto"),
        (["vla3.placement.ratio='rollout:actor = 1:1'"], None, "says nothing beside vla3.placement.ratio.*ratio=null"),
        (["vla3.placement.profile=nothing.json"], None, "profile nothing.json: not readable"),
        ([], profile("libero"), "of the simulator 'libero', this run's is 'maniskill'"),
        (["vla3.placement.node_gpus=[2,3]"], None, r"node_gpus: \[2, 3\].*the same number in every node"),
        (["vla3.placement.node_gpus=[]"], None, r"node_gpus: \[\]"),
    ],
)
def test_what_the_planner_cannot_choose_by_is_refused_with_the_fix(compose, overrides, file, message):
    choice, faults = auto.settle(*compose(*overrides, file=file))
    assert choice is None and len(faults) == 1
    assert re.search(message, faults[0]), faults[0]


def test_the_choice_is_set_passes_the_checks_and_says_why(compose):
    config, vla3 = compose("vla3.placement.node_gpus=[4]")
    choice, faults = auto.settle(config, vla3)
    assert faults == [] and "samples/s predicted, limited by" in choice.why
    assert vla3.placement.mode in ("collocated", "disaggregated")
    assert vla3.env.shards_per_worker == choice.settings["vla3.env.shards_per_worker"]
    assert config.data.train_batch_size == 128 and "data.train_batch_size" not in choice.settings, "the run's own"
    placement, faults = resolve.place(config, vla3)
    assert faults == [] and len(placement.cluster.gpus) == 1 and sum(placement.cluster.gpus) == 4


@pytest.mark.parametrize("given", ["mini_batch", "previous"])
def test_a_streamed_choice_plans_for_the_mini_batches_of_the_run(compose, given):
    config, vla3 = compose("vla3.placement.node_gpus=[8]", f"vla3.algorithm.advantage_statistics={given}",
                           "vla3.algorithm.num_mini_batches=4")  # fmt: skip
    choice, faults = auto.choose(config, vla3, resolve.cluster_of(config, vla3.placement))
    assert faults == [] and choice.settings["vla3.stages.streaming.enabled"]
    assert choice.settings["vla3.algorithm.advantage_statistics"] == given
    assert "vla3.algorithm.num_mini_batches" not in choice.settings, "the run's own"


def test_a_choice_is_for_as_many_devices_as_were_planned_for(compose):
    """Without an accelerator as many as the config has ranks and policy workers; a ratio alone forgets how many."""
    for train_ms in (0.5, 100.0):
        config, vla3 = compose("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=2",
                               file=profile(train_ms=train_ms))  # fmt: skip
        choice, faults = auto.settle(config, vla3)
        assert faults == [] and choice.settings["vla3.placement.node_gpus"] == [4]
        placement, faults = resolve.place(config, vla3)
        assert faults == [] and placement.cluster.gpus == (4,)
        counts = {name: len(placement.components[name]) for name in ("actor", "rollout")}
        assert f"{counts['rollout']} policy workers and {counts['actor']} learner ranks" in choice.why


def test_a_choice_that_the_configs_own_checks_refuse_is_passed_over(compose):
    """length_normalization cannot be streamed beside a critic."""
    config, vla3 = compose("vla3.placement.node_gpus=[8]", "vla3/stages@_global_=synchronous",
                           "vla3.algorithm.length_normalization=true")  # fmt: skip
    choice, faults = auto.settle(config, vla3)
    assert faults == [] and not choice.settings["vla3.stages.streaming.enabled"]
    assert contradictions(vla3) == []


def test_a_dear_learner_gets_more_devices_and_dear_simulators_more_policy_workers(compose):
    def learners(file):
        config, vla3 = compose("vla3.placement.node_gpus=[8]", file=file)
        assert auto.settle(config, vla3)[1] == []
        placement, faults = resolve.place(config, vla3)
        assert faults == []
        return 8 if vla3.placement.mode == "collocated" else len(placement.components["actor"])

    assert learners(profile(env_ms=2000.0, train_ms=0.5)) < learners(profile(env_ms=20.0, train_ms=100.0))


def test_a_run_that_is_resumed_keeps_what_was_chosen_when_it_began(compose, tmp_path):
    config, vla3 = compose("vla3.placement.node_gpus=[4]")
    chosen, _ = auto.settle(config, vla3)
    chosen.keep(tmp_path / "run")
    faster = profile(env_ms=1.0, train_ms=500.0)
    resumed = compose("vla3.placement.node_gpus=[4]", "trainer.resume_mode=auto", file=faster)
    again, faults = auto.settle(*resumed)
    assert faults == [] and again.settings == chosen.settings and "when this run began" in again.why
    anew, _ = auto.settle(*compose("vla3.placement.node_gpus=[4]", file=faster))
    assert anew.settings != chosen.settings


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"settings": {"vla3.placement.mood": 1}, "why": ""}', '{"settings": 3, "why": ""}']
)
def test_a_choice_that_was_damaged_is_refused_by_its_name(compose, tmp_path, text):
    config, vla3 = compose("vla3.placement.node_gpus=[4]", "trainer.resume_mode=auto")
    (tmp_path / "run" / auto.CHOICE_FILE).write_text(text)
    choice, faults = auto.settle(config, vla3)
    assert choice is None and len(faults) == 1 and auto.CHOICE_FILE in faults[0] and "remove it" in faults[0]


@pytest.mark.parametrize("change", [{"chunk_ms": ()}, {"mean_chunks": "6"}])
def test_a_profile_whose_numbers_are_none_is_refused_by_its_name(compose, change):
    broken = profile()
    config, vla3 = compose("vla3.placement.node_gpus=[4]", file=broken.but(env=replace(broken.env, **change)))
    choice, faults = auto.settle(config, vla3)
    assert choice is None and "profile.json" in faults[0], faults


def test_a_plan_that_memory_does_not_allow_is_passed_over(compose, monkeypatch):
    from vla3_plugin.trainer import preflight

    config, vla3 = compose("vla3.placement.node_gpus=[4]")
    best, _ = auto.settle(config, vla3)
    refused = best.settings["vla3.env.shards_per_worker"]

    def fits(config, vla3):
        return ["too large"] if vla3.env.shards_per_worker == refused else []

    monkeypatch.setattr(preflight, "memory_faults", fits)
    config, vla3 = compose("vla3.placement.node_gpus=[4]")
    other, faults = auto.settle(config, vla3)
    assert (faults == [] and other.settings["vla3.env.shards_per_worker"] != refused) or "too large" in faults[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_places_itself(launch, line, tmp_path):
    profile("toy", env_ms=5.0, train_ms=2.0).save(tmp_path / "profile.json")
    run = launch(
        tmp_path / "run", *line, "vla3.placement.mode=auto", f"vla3.placement.profile={tmp_path}/profile.json",
        "trainer.total_training_steps=2", "trainer.val_before_train=false",
    )  # fmt: skip
    assert run.status == 0, run.output[-3000:]
    said = json.loads((run.directory / "preflight.json").read_text())["placement"]
    kept = json.loads((run.directory / auto.CHOICE_FILE).read_text())
    assert said["chosen"] == kept["why"] and "samples/s predicted" in " ".join(run.output.split())
    config = OmegaConf.load(run.directory / "config.yaml")
    assert all(OmegaConf.select(config, key) == value for key, value in kept["settings"].items())
    assert [row["step"] for row in run.metrics] == [1, 2]
