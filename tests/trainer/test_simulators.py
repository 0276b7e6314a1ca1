"""The shipped recipes with their embedded policies in the real simulators, shortened to one step."""

import importlib.util
import math

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def check(run):
    assert run.status == 0, run.output[-3000:]
    assert run.metrics[0]["rollout/logprob_diff_max"] < 1e-4
    assert math.isfinite(run.metrics[0]["actor/grad_norm"])
    assert [e["n"] for e in run.evaluations] == [2]
    assert (run.directory / "report.html").exists()
    assert (run.directory / "checkpoints" / "global_step_1" / "policy" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def maniskill(launch, tmp_path_factory):
    return launch(
        tmp_path_factory.mktemp("maniskill") / "run", "data.train_batch_size=8", "vla3.env.envs_per_shard=2",
        "trainer.total_training_steps=1", "vla3.evaluation.episodes_per_task=2", "trainer.save_freq=1",
        "trainer.test_freq=-1",
    )  # fmt: skip


@needs("mani_skill")
def test_maniskill_recipe_trains_a_step_in_the_simulator(maniskill):
    check(maniskill)
    assert maniskill.metrics[0]["env/episodes"] == 8


@needs("mani_skill")
def test_images_cross_each_boundary_once_and_never_pass_through_the_driver(maniskill):
    """The padding rows and the parity check used to carry whole samples through the driver."""
    row = maniskill.metrics[0]
    data = {name.rpartition("/")[2]: size for name, size in row.items() if name.startswith("traffic/data/")}
    samples, views = row["rollout/chunk_steps"], 2 * 64 * 64 * 3
    looks = samples + row["env/episodes"]  # each episode's final observation too
    # one evaluation episode and more were played in this window as well
    assert looks * views <= data["simulator_to_env"] <= 2 * looks * views
    prepared = data["env_to_store"] / samples  # a sample: its inputs, and what makes its log-prob recomputable
    assert views <= prepared < data["env_to_policy"] / samples * 1.2
    checked = 2 * 32 * prepared  # the parity check's samples, copied and evaluated
    assert data["store_to_learner"] < 1.1 * data["env_to_store"] + checked + 16 * prepared, "fetched once an update"
    assert data["store_to_driver"] < 0.05 * data["env_to_store"], "no image"
    assert data["driver_to_store"] < 0.05 * data["env_to_store"]
    assert data["store_to_checkpoint"] == 0, "nothing is in flight on one clock"
    policy = maniskill.directory / "checkpoints" / "global_step_1" / "policy" / "model.safetensors"
    assert row["traffic/weights/learner_to_policy"] / policy.stat().st_size == pytest.approx(2, rel=0.1)


@needs("mani_skill")
@pytest.mark.long
def test_adapters_train_and_only_the_layers_that_they_change_are_published_again(launch, tmp_path):
    run = launch(
        tmp_path / "run", "data.train_batch_size=8", "vla3.env.envs_per_shard=2", "trainer.total_training_steps=2",
        "trainer.val_before_train=false", "trainer.save_freq=2", "trainer.test_freq=-1",
        "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.exclude_modules='.*vision.*'",
    )  # fmt: skip
    assert run.status == 0, run.output[-3000:]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in run.metrics), "of what was published in part as well"
    size = (run.directory / "checkpoints" / "global_step_2" / "policy" / "model.safetensors").stat().st_size
    first, second = (row["traffic/weights/learner_to_policy"] for row in run.metrics)
    assert second < 0.9 * size < first, "in the first step's window everything, and then what is adapted"


@needs("libero")
def test_libero_recipe_trains_a_step_in_the_simulator(launch, tmp_path):
    """Episodes are cut to three chunks, so every return is 0: no group has a spread, and the step must say so."""
    run = launch(
        tmp_path / "run", "data.train_batch_size=4", "vla3.algorithm.group_size=2", "trainer.total_training_steps=1",
        "vla3.evaluation.episodes_per_task=2", "vla3.evaluation.videos=1", "trainer.save_freq=1",
        "trainer.test_freq=-1", "+vla3.env.options.max_steps=24", "vla3.algorithm.kl_beta=0", recipe="vla3_libero",
    )  # fmt: skip
    assert run.status == 0, run.output[-3000:]
    assert run.metrics[0]["actor/groups_without_spread"] == 2
    assert "actor/grad_norm" not in run.metrics[0], "nothing to learn from, so nothing may move"
    assert run.metrics[0]["rollout/logprob_diff_max"] < 1e-4
    assert list((run.directory / "videos").rglob("*.mp4"))
