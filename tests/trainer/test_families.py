"""Each policy family's nano preset, from fresh weights, through whole runs of two steps in a simulator."""

import importlib.util
import math

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from vla3_plugin.policies.registry import load_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = [
    "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.val_before_train=false", "trainer.test_freq=-1",
    "vla3.evaluation.episodes_per_task=2", "vla3.evaluation.videos=0", "vla3.algorithm.update_epoch=1",
    "vla3.algorithm.num_mini_batches=1",
]  # fmt: skip
SYNCHRONOUS = ["vla3/stages@_global_=synchronous"]
PICKCUBE = ["data.train_batch_size=4", "vla3.env.envs_per_shard=2", "vla3.env.shards_per_worker=1",
            "+vla3.env.options.max_steps=16"]  # fmt: skip
GRPO = [
    "vla3.algorithm.adv_type=grpo", "vla3.algorithm.loss_type=actor", "vla3.algorithm.group_size=4",
    "vla3.algorithm.logprob_type=token",
]  # fmt: skip


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def check(run, moving, preset, **options):
    """Two steps with finite numbers, log-probs alike on both sides, and ``moving`` parameters that moved a little from
    those that ``preset`` with ``options`` starts with."""
    assert run.status == 0, run.output[-3000:]
    assert [row["step"] for row in run.metrics] == [1, 2]
    for row in run.metrics:
        wrong = {key: value for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        assert not wrong
        assert row["actor/grad_norm"] > 0
    assert run.metrics[0]["rollout/logprob_diff_max"] < 1e-4
    trained = load_file(run.directory / "checkpoints" / "global_step_2" / "policy" / "model.safetensors")
    fresh = load_policy(preset, **options).state_dict()
    assert trained.keys() == fresh.keys()
    moved = {name: (trained[name] - fresh[name]).abs().max().item() for name in fresh}
    assert all(way < 0.01 for way in moved.values()), "other weights than those it started with, or not finite"
    for part in moving:
        assert any(way > 0 for name, way in moved.items() if part in name), f"{part}: no parameter of it moved"


@needs("mani_skill")
def test_pi05_trains_with_ppo_on_maniskill_on_three_clocks(launch, tmp_path):
    run = launch(tmp_path / "run", *SHORT, *PICKCUBE, recipe="vla3_maniskill_pi05")
    check(run, ["pi05.vlm.", "pi05.expert.", "value_head."], "pi05-nano", processing="maniskill")


@needs("mani_skill")
@pytest.mark.long
def test_pi05_trains_under_megatron_and_is_resumed(launch, tmp_path):
    pytest.importorskip("megatron.core")
    line = [*SHORT, *PICKCUBE, "model_engine=megatron"]
    run = launch(tmp_path / "run", *line, recipe="vla3_maniskill_pi05")
    check(run, ["pi05.vlm.", "pi05.expert.", "value_head."], "pi05-nano", processing="maniskill")
    more = ["trainer.total_training_steps=3", "trainer.resume_mode=auto"]
    run = launch(tmp_path / "run", *line, *more, recipe="vla3_maniskill_pi05")
    assert run.status == 0, run.output[-3000:]
    assert [row["step"] for row in run.metrics] == [1, 2, 3] and run.metrics[2]["rollout/logprob_diff_max"] < 1e-4


@needs("mani_skill")
@pytest.mark.long
def test_openvla_oft_trains_with_ppo_on_maniskill_on_one_clock(launch, tmp_path):
    run = launch(tmp_path / "run", *SHORT, *PICKCUBE, *SYNCHRONOUS, recipe="vla3_maniskill_openvla_oft")
    moving = ["language_model.", "vision_backbone.", "value_head."]
    check(run, moving, "openvla-oft-nano", processing="maniskill", value_level="action")


@needs("libero")
@pytest.mark.long
def test_gr00t_trains_with_ppo_on_libero_on_one_clock(launch, tmp_path):
    run = launch(
        tmp_path / "run", *SHORT, *SYNCHRONOUS, "data.train_batch_size=2", "vla3.env.shards_per_worker=1",
        "+vla3.env.options.max_steps=16", recipe="vla3_libero_gr00t",
    )  # fmt: skip
    check(run, ["gr00t.backbone.", "gr00t.action_head.", "value_head."], "gr00t-n1.5-nano", processing="libero")


@pytest.mark.long  # of the token policies OpenVLA-OFT is in every test run (test_stages)
def test_openvla_trains_with_grpo_on_a_toy_on_three_clocks(launch, toy_record, tmp_path):
    run = launch(
        tmp_path / "run", *SHORT, *GRPO, "vla3.env.name=toy", "~vla3.env.options.task", "vla3.env.envs_per_shard=4",
        "vla3.env.shards_per_worker=1", "data.train_batch_size=8", "+vla3.env.options.max_steps=8",
        f"actor_rollout_ref.model.options.processing={toy_record}", recipe="vla3_maniskill_openvla",
    )  # fmt: skip
    check(run, ["language_model.", "vision_backbone."], "openvla-nano", processing=toy_record)


LIBERO = ["vla3.env.shards_per_worker=1", "+vla3.env.options.max_steps=16"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "module", "line", "moving"),
    [
        ("vla3_maniskill_gr00t", "mani_skill", PICKCUBE, ["gr00t.backbone.", "gr00t.action_head.", "value_head."]),
        ("vla3_maniskill_openvla", "mani_skill", PICKCUBE, ["language_model.", "vision_backbone.", "value_head."]),
        ("vla3_libero_pi05", "libero", [*LIBERO, "data.train_batch_size=2"], ["pi05.vlm.", "pi05.expert."]),
        # fresh weights never succeed, and groups of equal returns teach nothing: played and stored, not trained on
        ("vla3_libero_openvla", "libero", [*LIBERO, "data.train_batch_size=8"], []),
        ("vla3_libero_openvla_oft", "libero", [*LIBERO, "data.train_batch_size=8"], []),
    ],
)
def test_the_recipe_runs_in_its_simulator(launch, tmp_path, recipe, module, line, moving):
    """What no test above has run."""
    pytest.importorskip(module)
    run = launch(tmp_path / "run", *SHORT, *line, recipe=recipe)
    assert run.status == 0, run.output[-3000:]
    assert [row["step"] for row in run.metrics] == [1, 2]
    if moving:
        config = OmegaConf.load(run.directory / "config.yaml").actor_rollout_ref.model
        check(run, moving, config.path, **config.options)
    else:
        assert all(row["env/episodes"] == 8 and row["env/success_rate"] == 0 for row in run.metrics)
