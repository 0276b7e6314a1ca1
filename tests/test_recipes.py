"""Every recipe in both profiles: it composes, it is valid, and its policy takes its options."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from vla3_plugin import config_cross, config_megatron, config_verl
from vla3_plugin.config import parse
from vla3_plugin.policies.env_records import env_record_names
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.registry import build_policy, load_processing, policy_summary
from vla3_plugin.resources import recipe_names

pytestmark = pytest.mark.slow

FAMILIES = {"pi0": "pi0", "pi05": "pi05", "gr00t": "gr00t_n1_5", "openvla": "openvla", "openvla_oft": "openvla_oft"}
NAMES = {(env, family): "_".join(["vla3", env, *([family] * (family != "pi0"))]) for env in ("libero", "maniskill")
         for family in FAMILIES}  # fmt: skip


@pytest.fixture(scope="module")
def composed():
    """``composed(recipe, profile)``: the config, composed as ``python -m verl.trainer.main`` does."""
    import verl  # noqa: F401  loads the plugin
    from hydra import compose, initialize_config_module

    found = {}

    def get(recipe, profile):
        if (recipe, profile) not in found:
            device = {"cpu": "cpu", "gpu": "cuda"}[profile]
            with pytest.MonkeyPatch.context() as patch, initialize_config_module(
                "verl.trainer.config", version_base=None
            ):  # fmt: skip
                patch.setenv("VLA3_PROFILE", profile)
                found[recipe, profile] = compose("ppo_trainer", [f"+recipe={recipe}", f"trainer.device={device}"])
        return found[recipe, profile]

    return get


def options_of(config):
    return OmegaConf.to_container(config.actor_rollout_ref.model.options, resolve=True)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_valid_in_both_profiles(composed, recipe, profile):
    config = composed(recipe, profile)
    vla3 = parse(config.vla3)
    assert config_verl.faults(config) == []
    assert config_cross.faults(config, vla3) == []
    assert config_cross.notes(config, vla3) == []
    assert config.trainer.experiment_name == recipe


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_valid_with_megatron(monkeypatch, recipe, profile):
    import verl  # noqa: F401  loads the plugin
    from hydra import compose, initialize_config_module

    monkeypatch.setattr(config_megatron, "missing", lambda: None)  # installed or not
    monkeypatch.setenv("VLA3_PROFILE", profile)
    monkeypatch.setenv("VLA3_MODEL_ENGINE", "megatron")  # what the command line says in a run
    device = {"cpu": "cpu", "gpu": "cuda"}[profile]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"+recipe={recipe}", "model_engine=megatron", f"trainer.device={device}"])
    assert config_verl.faults(config) == [] == config_cross.faults(config, parse(config.vla3))
    actor = config.actor_rollout_ref.actor
    assert actor.strategy == config.actor_rollout_ref.ref.strategy == "megatron" and "fsdp_config" not in actor


def test_every_family_has_a_recipe_for_every_simulator():
    assert set(NAMES.values()) <= set(recipe_names())


@pytest.mark.parametrize("env, family", NAMES)
def test_on_a_cpu_a_recipe_takes_its_familys_nano_policy(composed, env, family):
    config = composed(NAMES[env, family], "cpu")
    model = config.actor_rollout_ref.model
    summary = policy_summary(model.path, **options_of(config))
    assert summary["family"] == FAMILIES[family]
    assert summary["parameters"] < 5e6
    level = summary["value_level"]
    assert level == "chunk" or config.vla3.algorithm.adv_type == "grpo" or config.vla3.algorithm.reward_type == level


@pytest.mark.parametrize("env, family", NAMES)
def test_on_gpus_the_published_sizes_take_a_recipes_settings(composed, env, family):
    """On the meta device, with an environment's record and a tokenizer in the place of those that come with weights."""
    options = options_of(composed(NAMES[env, family], "gpu"))
    preset = next(name for name in PRESETS.values() if name.family == FAMILIES[family] and not name.words)
    nano = next(name for name, p in PRESETS.items() if p.family == FAMILIES[family] and p.words)
    for key in ("processing", "family", "unnorm_key", "crop_side", "record"):  # what reads a checkpoint's files
        options.pop(key, None)
    name = next(name for name, p in PRESETS.items() if p is preset)
    record = load_processing(name, processing=env, tokenizer=load_processing(nano, processing=env).prompts.tokenizer)
    model = {}
    if family == "gr00t":  # where its tokenizer puts an image
        eagle = preset.model["eagle_config"]
        model = {"model": {"eagle_config": {**eagle, "image_token_index": record.prompts.image_token}}}
    with torch.device("meta"):
        summary = build_policy(name, record, **model, **options).describe()
    assert summary["parameters"] > 2e9
    assert {key: summary[key] for key in options} == options


def published(config):
    algorithm, actor, model = config.vla3.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    return {
        "algorithm": algorithm.adv_type,
        "levels": f"{algorithm.reward_type}/{algorithm.logprob_type}",
        "clip": (algorithm.clip_ratio_low, algorithm.clip_ratio_high),
        "group": algorithm.group_size,
        "episodes": config.data.train_batch_size,
        "updates": (algorithm.update_epoch, algorithm.num_mini_batches),
        "micro": actor.ppo_micro_batch_size_per_gpu,
        "lr": (actor.optim.lr, model.value_lr),
        "clip_grad": actor.optim.clip_grad,
        "lora": model.lora_rank,
    }


TABLE = {  # lr: the policy's and the value head's; updates: epochs and optimizer steps an epoch
    "vla3_libero_pi05": dict(
        algorithm="gae", levels="chunk/chunk", clip=(0.2, 0.2), group=1, episodes=512, updates=(4, 12), micro=128,
        lr=(5e-6, 1e-4), clip_grad=1.0, lora=0,
    ),
    "vla3_maniskill_pi05": dict(
        algorithm="gae", levels="chunk/chunk", clip=(0.2, 0.2), group=1, episodes=320, updates=(5, 1), micro=32,
        lr=(7.91e-6, 1.55e-4), clip_grad=1.0, lora=0,
    ),
    "vla3_libero_gr00t": dict(
        algorithm="gae", levels="chunk/chunk", clip=(0.2, 0.2), group=1, episodes=512, updates=(1, 24), micro=128,
        lr=(2e-5, 2e-5), clip_grad=2.0, lora=0,
    ),
    "vla3_maniskill_openvla": dict(
        algorithm="gae", levels="action/action", clip=(0.2, 0.2), group=1, episodes=256, updates=(1, 32), micro=80,
        lr=(1e-4, 3e-3), clip_grad=10.0, lora=32,
    ),
    "vla3_libero_openvla": dict(
        algorithm="grpo", levels="action/token", clip=(0.2, 0.28), group=8, episodes=128, updates=(1, 16), micro=40,
        lr=(1e-5, None), clip_grad=1.0, lora=0,
    ),
    "vla3_libero_openvla_oft": dict(
        algorithm="grpo", levels="action/token", clip=(0.2, 0.28), group=8, episodes=1024, updates=(1, 4), micro=32,
        lr=(2e-5, None), clip_grad=1.0, lora=0,
    ),
    "vla3_maniskill_openvla_oft": dict(
        algorithm="gae", levels="action/token", clip=(0.2, 0.28), group=1, episodes=256, updates=(1, 4), micro=40,
        lr=(1e-4, 3e-3), clip_grad=10.0, lora=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", TABLE)
def test_on_gpus_the_published_defaults_hold(composed, recipe):
    config = composed(recipe, "gpu")
    assert published(config) == TABLE[recipe]
    algorithm = config.vla3.algorithm
    assert (algorithm.gamma, algorithm.gae_lambda, algorithm.clip_ratio_c) == (0.99, 0.95, 3.0)
    assert (algorithm.value_clip, algorithm.huber_delta, algorithm.kl_beta) == (0.2, 10.0, 0.0)


CHUNKS = {"vla3_libero_pi05": 10, "vla3_maniskill_pi05": 5, "vla3_libero_gr00t": 10}


@pytest.mark.parametrize("recipe", CHUNKS)
def test_on_gpus_flow_policies_execute_and_denoise_as_published(composed, recipe):
    options = options_of(composed(recipe, "gpu"))
    assert (options["executed"], options["num_steps"]) == (CHUNKS[recipe], 4)
    if recipe == "vla3_maniskill_pi05":
        assert (options["method"], options["sde_mode"], options["joint_reduction"]) == ("flow_noise", "joint", "mean")
    else:
        assert (options["noise_level"], options["sde_mode"]) == (0.5, "mixed")


def test_on_gpus_openvla_oft_filters_groups_by_the_published_bounds(composed):
    config = composed("vla3_libero_openvla_oft", "gpu")
    algorithm, reward = config.vla3.algorithm, config.vla3.env.options.reward_coef
    assert algorithm.filter_rewards and reward == 5.0
    assert (algorithm.rewards_lower_bound / reward, algorithm.rewards_upper_bound / reward) == (0.1, 0.9)
    assert options_of(config)["temperature"] == 1.6


def test_the_records_are_of_the_recipes_environments():
    assert env_record_names() == ["libero", "maniskill"]
    record = load_processing("pi05-nano", processing="maniskill")
    assert record.cameras == ["base_camera", "hand_camera"] and record.state_dim == 20
    assert record.action.kind == "quantiles" and "{state}" in record.prompt
    assert load_processing("pi0-nano", processing="libero").action.kind == "mean_std"


def test_a_checkpoint_takes_an_environments_record_by_name_too(tmp_path):
    """At the image size and with the statistics of the preset that the directory was built as."""
    build_policy("openvla-nano", load_processing("openvla-nano", processing="maniskill")).save(tmp_path)
    told = {"processing": "libero", "tokenizer": tmp_path}
    record = load_processing(tmp_path, **told)
    assert record.cameras == ["agentview", "wrist"] and record.image_size == (64, 64)
    assert policy_summary(tmp_path, **told)["cameras"] == "agentview, wrist"
