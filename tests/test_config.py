"""The schema: what is accepted, and that a refusal names the key, the value and the fix."""

import dataclasses
import re
import typing

import pytest
from omegaconf import OmegaConf

from vla3_plugin import config_cross
from vla3_plugin.config import ConfigError, VLA3Config, known_keys, parse, unknown_key
from vla3_plugin.config_checks import CHOICES, RANGES, text_faults


def test_the_defaults_are_valid():
    assert parse(OmegaConf.structured(VLA3Config)).algorithm.adv_type == "gae"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algoritm": {}}, r"vla3\.algoritm: unknown key; did you mean vla3\.algorithm\?"),
        ({"env": {"shard_per_worker": 2}}, r"shard_per_worker: unknown key; did you mean vla3.env.shards_per_worker\?"),
        ({"env": {"workers": "two"}}, r"vla3\.env\.workers: Value 'two'"),
        ({"seed": 1.5}, r"vla3\.seed"),
        ({"env": {"shards_per_worker": 0}}, r"vla3\.env\.shards_per_worker: 0, expected more than 0"),
        ({"algorithm": {"adv_type": "gea"}}, r"'gea', expected one of gae, grpo; did you mean gae\?"),
        ({"algorithm": {"gamma": 1.2}}, r"vla3\.algorithm\.gamma: 1\.2, expected 0 to 1"),
        ({"algorithm": {"adv_type": "grpo", "loss_type": "actor"}}, r"group_size: 1, expected at least 2"),
        ({"algorithm": {"adv_type": "grpo", "group_size": 4}}, r"loss_type: 'actor_critic' with adv_type grpo"),
        ({"algorithm": {"loss_type": "actor"}}, r"loss_type: 'actor' with adv_type gae"),
        ({"algorithm": {"logprob_type": "tokens"}}, r"logprob_type: 'tokens' is not a level"),
        ({"algorithm": {"reward_type": "action"}}, r"logprob_type: 'chunk' with reward_type: 'action'"),
        ({"algorithm": {"clip_ratio_low": 0.0}}, r"clip_ratio_low: 0\.0"),
        ({"env": {"shards_per_worker": 2, "pipeline_stage_num": 3}}, r"pipeline_stage_num: 3, expected at most"),
        ({"env": {"host": "rollout"}}, r"env\.host: 'rollout', expected one of own, policy_worker"),
        ({"env": {"isolation": "none"}}, r"isolation: 'none' with vla3\.env\.shards_per_worker: 2, expected 1"),
        ({"env": {"isolation": "none", "python": "python3"}}, r"isolation: 'none' with vla3\.env\.python: 'python3'"),
        (
            {"env": {"isolation": "none", "shards_per_worker": 1, "host": "policy_worker", "nice": 5}},
            r"'policy_worker' and vla3\.env\.nice: 5",
        ),
        ({"env": {"nice": 20}}, r"env\.nice: 20, expected 0 to 19"),
        ({"env": {"isolation": "none", "recycle_mb": 900}}, r"isolation: 'none' with vla3\.env\.recycle_mb: 900"),
        ({"stages": {"training": {"max_staleness": -1}}}, r"max_staleness: -1, expected 0 or more"),
        ({"stages": {"interaction": {"batching": "join"}}}, r"batching: 'join', expected one of run_to_completion"),
        ({"stages": {"interaction": {"max_queue": 4, "max_batch_size": 8}}}, r"max_queue: 4, expected at least"),
        ({"stages": {"streaming": {"enabled": True}}}, r"advantage_statistics: 'batch' with vla3\.stages\.streaming"),
        (
            {"stages": {"streaming": {"enabled": True}}, "algorithm": {"advantage_statistics": "mini_batch"}},
            r"'mini_batch' with vla3\.stages\.streaming\.enabled and num_mini_batches = 1.*use 'previous'",
        ),
        (
            {"algorithm": {"advantage_statistics": "mini_batch", "num_mini_batches": 2}},
            r"advantage_statistics: 'mini_batch' with mini_batches: 'samples', expected 'episodes'",
        ),
        (
            {"stages": {"streaming": {"enabled": True}}, "algorithm": {"num_mini_batches": 2}},
            r"mini_batches: 'samples' with vla3\.stages\.streaming",
        ),
        (
            {
                "stages": {"streaming": {"enabled": True}},
                "algorithm": {"advantage_statistics": "previous", "logprob_type": "action"},
            },
            r"logprob_type: 'action' with reward_type 'chunk'",
        ),
        (
            {"algorithm": {"filter_rewards": True, "rewards_lower_bound": 0.9, "rewards_upper_bound": 0.1}},
            r"rewards_lower_bound: 0\.9 is above",
        ),
    ],
)
def test_a_fault_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse(OmegaConf.create(overrides))


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse(OmegaConf.create({"env": {"shards_per_worker": 0, "workers": 0}, "algorithm": {"gamma": 2.0}}))
    assert len(caught.value.faults) == 3


def test_known_keys_cover_every_level():
    assert {"vla3.seed", "vla3.env.python", "vla3.algorithm.clip_ratio_c"} <= set(known_keys())


def _numbers(cls=VLA3Config, prefix=""):
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(f.default_factory):
            yield from _numbers(f.default_factory, f"{prefix}{f.name}.")
        elif typing.get_type_hints(cls)[f.name] in (int, float, int | None, float | None):
            yield f"{prefix}{f.name}"


def test_every_number_of_the_schema_has_a_range_and_every_check_a_key():
    """Whoever adds a number says what it may be (``config_checks.RANGES``): no NaN and no -1 reaches a worker."""
    assert set(RANGES) == set(_numbers())
    assert {f"vla3.{path}" for path in CHOICES} <= set(known_keys())


@pytest.mark.parametrize("path", sorted(RANGES))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30, 1e30, "many", [], {}, {"a": 1}])
def test_no_number_of_the_schema_takes_what_is_none(path, value):
    node = value
    for part in reversed(path.split(".")):
        node = {part: node}
    with pytest.raises(ConfigError) as refused:
        parse(OmegaConf.create(node))
    assert f"vla3.{path}: " in str(refused.value)


@pytest.mark.parametrize("node", [None, 7, "x", [1], OmegaConf.create([1])])
def test_the_tree_itself_must_be_a_mapping(node):
    with pytest.raises(ConfigError, match=r"vla3: .*, expected a mapping"):
        parse(node)


def test_a_part_of_the_tree_must_be_a_mapping_too_and_its_keys_are_named():
    with pytest.raises(ConfigError, match=r"vla3\.stages\.streaming: None, expected a mapping with the keys enabled"):
        parse(OmegaConf.create({"stages": {"streaming": None}}))


def test_ill_typed_values_are_all_named_at_once_with_what_is_out_of_range():
    with pytest.raises(ConfigError) as refused:
        parse(OmegaConf.create({"env": {"workers": "two", "tasks": "all", "timeout_s": -1}, "seed": [1], "sed": 1}))
    assert len(refused.value.faults) == 5


def test_options_of_a_simulator_are_its_own_affair():
    assert parse(OmegaConf.create({"env": {"options": {"anything": {"at": ["all"]}}}})).env.options["anything"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vla3.algoritm.gamma", "did you mean vla3.algorithm.gamma?"),
        ("vla3.stages.training.max_stalenes", "did you mean vla3.stages.training.max_staleness?"),
        ("vla3.stages.streaming.zzzzzzzzzzzzzzzzzzzzzz", "unknown key"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(name, hint):
    assert hint in (unknown_key(name) or "")
    assert unknown_key("vla3.env.options.whatever") is None and unknown_key("vla3.env") is None


def agreeing(**changes):
    """The keys of verl that must agree with ``vla3``, in a state where they do."""
    tree = OmegaConf.create(
        {
            "data": {"train_batch_size": 32},
            "trainer": {"device": "cpu", "total_training_steps": 10},
            "transfer_queue": {"backend": {"SimpleStorage": {"total_storage_size": 1000}}},
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp2",
                    "fsdp_config": {"param_offload": False, "optimizer_offload": False},
                    "optim": {"lr": 1e-4},
                },
                "rollout": {
                    "n_gpus_per_node": 1, "nnodes": 1, "tensor_model_parallel_size": 1,
                    "checkpoint_engine": {"backend": "vla3_gloo"},
                },
            },
        }
    )  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(tree, key.replace("__", "."), value)
    return tree


@pytest.mark.parametrize(
    ("verl", "ours", "message"),
    [
        ({"data__train_batch_size": 30}, {"algorithm": {"group_size": 8}}, "30 episodes do not divide .* use 24"),
        (
            {"data__train_batch_size": 400},
            {"stages": {"training": {"enabled": True, "max_staleness": 2}}},
            r"train_batch_size: 400 episodes, of 3 steps at once .*total_storage_size = 1000",
        ),
        ({"actor_rollout_ref__actor__strategy": "fsdp"}, {}, "cannot shard CPU parameters; use fsdp2"),
        ({"actor_rollout_ref__actor__strategy": "megatron"}, {}, "fsdp_config: .*with model_engine=megatron"),
        ({"actor_rollout_ref__rollout__checkpoint_engine__backend": "nccl"}, {}, "'nccl' needs an accelerator"),
        ({"actor_rollout_ref__rollout__n_gpus_per_node": 3}, {}, r"vla3\.env\.workers: 1 for 3 policy workers"),
        (
            {},
            {"env": {"workers": 2, "host": "policy_worker", "isolation": "none", "shards_per_worker": 1}},
            r"isolation: 'none' with .*'policy_worker' and vla3\.env\.workers: 2 for 1 policy workers, expected 1",
        ),
        (
            {},
            {"algorithm": {"num_mini_batches": 33, "mini_batches": "episodes"}},
            "33 mini-batches of whole groups, but a step has 32",
        ),
    ],
)
def test_keys_of_verl_and_ours_must_agree(verl, ours, message):
    assert config_cross.faults(agreeing(), parse(OmegaConf.create({}))) == []
    (fault,) = config_cross.faults(agreeing(**verl), parse(OmegaConf.create(ours)))
    assert re.search(message, fault), fault


def test_environments_that_would_never_work_are_noted():
    assert config_cross.notes(agreeing(), parse(OmegaConf.create({"env": {"envs_per_shard": 16}}))) == []
    (note,) = config_cross.notes(agreeing(), parse(OmegaConf.create({"env": {"envs_per_shard": 20}})))
    assert "40 environments, but at most 32 episodes" in note and "8 of them" in note


def test_control_characters_are_found_anywhere_and_named():
    tree = {"a": {"b": ["fine\n", "x\x1by"]}, "c": {"d\x00": 1}}
    first, second = text_faults(tree, "")
    assert first == "a.b.1: 'x\\x1by' holds a control character; remove it" and second.startswith("c: 'd\\x00'")
