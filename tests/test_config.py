"""The schema: what is accepted, and that a refusal names the key, the value and the fix."""

import pytest
from omegaconf import OmegaConf

from vla3_plugin.config import ConfigError, VLA3Config, known_keys, parse


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
        ({"stages": {"training": {"max_staleness": -1}}}, r"max_staleness: -1, expected 0 or more"),
        ({"stages": {"interaction": {"batching": "join"}}}, r"batching: 'join', expected one of run_to_completion"),
        ({"stages": {"interaction": {"max_queue": 4, "max_batch_size": 8}}}, r"max_queue: 4, expected at least"),
        ({"stages": {"streaming": {"enabled": True}}}, r"advantage_statistics: 'batch' with vla3\.stages\.streaming"),
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
