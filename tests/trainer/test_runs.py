"""A user's command, from start to report, with real processes: Ray, verl's FSDP2 engine, TransferQueue, simulators."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def whole(launch, line, tmp_path_factory):
    """Six steps without a break, a checkpoint every third."""
    return launch(
        tmp_path_factory.mktemp("whole") / "run", *line, "trainer.total_training_steps=6", "trainer.save_freq=3",
        "vla3.keep_checkpoints=5",
    )  # fmt: skip


def test_third_party_policy_and_env_run_from_start_to_report(whole):
    assert whole.status == 0, whole.output[-3000:]
    assert [row["step"] for row in whole.metrics] == [1, 2, 3, 4, 5, 6]
    assert whole.evaluations[0]["env"] == "line" and whole.evaluations[0]["n"] == 8
    assert "profile" in whole.output and "cpu" in whole.output
    assert (whole.directory / "report.html").stat().st_size > 10_000
    assert list((whole.directory / "videos").rglob("*.mp4"))


def test_rollout_and_learner_agree_about_log_probs(whole):
    assert whole.metrics[0]["rollout/logprob_diff_max"] < 1e-4
    assert whole.metrics[0]["rollout/value_diff_max"] < 1e-4


def test_training_moves_the_policy_towards_more_return(whole):
    """An easy task (walk right): the noisy policy's return must rise within six steps."""
    assert whole.metrics[-1]["env/return/mean"] > whole.metrics[0]["env/return/mean"]


def test_resumed_run_equals_the_uninterrupted_one(whole, launch, line, tmp_path):
    """Stopped at step 3 and resumed: the same episodes in the same order, the same parameters."""
    directory = tmp_path / "run"
    kept = directory / "checkpoints" / "global_step_3"
    shutil.copytree(whole.directory / "checkpoints" / "global_step_3", kept)
    damaged = directory / "checkpoints" / "global_step_4"
    shutil.copytree(kept, damaged)
    weights = next(damaged.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-7])
    resumed = launch(
        directory, *line, "trainer.total_training_steps=6", "trainer.save_freq=3", "trainer.resume_mode=auto",
        "trainer.val_before_train=false", "vla3.keep_checkpoints=5",
    )  # fmt: skip
    assert resumed.status == 0, resumed.output[-3000:]
    assert "skipping checkpoint global_step_4" in resumed.output
    assert [row["step"] for row in resumed.metrics] == [4, 5, 6]
    for mine, theirs in zip(resumed.metrics, whole.metrics[3:], strict=True):
        assert mine["env/return/mean"] == theirs["env/return/mean"]
        assert mine["env/steps_total"] == theirs["env/steps_total"]
    first, second = (_policy(run.directory, 6) for run in (whole, resumed))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)


def _policy(directory: Path, step: int):
    return load_file(directory / "checkpoints" / f"global_step_{step}" / "policy" / "model.safetensors")


def test_number_of_workers_does_not_change_what_is_learned_from(whole, launch, line, tmp_path):
    """Noise and initial states belong to the episode: three workers collect what one does."""
    run = launch(
        tmp_path / "run", *line, "trainer.total_training_steps=1", "vla3.env.workers=3", "vla3.env.shards_per_worker=1",
        "vla3.env.envs_per_shard=1", "trainer.val_before_train=false",
    )  # fmt: skip
    assert run.status == 0, run.output[-3000:]
    # batches of another make-up round differently; another sample would differ in the first digits
    assert run.metrics[0]["env/return/mean"] == pytest.approx(whole.metrics[0]["env/return/mean"], rel=1e-5)
    assert run.metrics[0]["env/steps_total"] == whole.metrics[0]["env/steps_total"]


def test_grpo_with_reference_policy_through_main_ppo(whole, launch, line, tmp_path):
    run = launch(
        tmp_path / "run", *line, "trainer.total_training_steps=2", "vla3.algorithm.adv_type=grpo",
        "vla3.algorithm.loss_type=actor", "vla3.algorithm.group_size=8", "vla3.algorithm.kl_beta=0.1",
        "vla3.algorithm.logprob_type=token", "trainer.val_before_train=false", "vla3.algorithm.update_epoch=1",
        "vla3.algorithm.num_mini_batches=1", "vla3.env.pipeline_stage_num=2", "vla3.publish=all",
        module="verl.trainer.main_ppo",
    )  # fmt: skip
    assert run.status == 0, run.output[-3000:]
    assert "lanes/env0/shard_1/busy" in run.metrics[0], "two pipeline stages are two loops, each with its lane"
    assert run.metrics[0]["actor/kl"] == pytest.approx(0.0, abs=1e-5), "before any update they are one"
    assert run.metrics[1]["actor/kl"] > 0
    published = [found.metrics[1]["traffic/weights/learner_to_policy"] for found in (run, whole)]
    assert 0 < published[0] < published[1], "all of this policy trains, so only the mark of a partial one is more"
