"""The three stages in whole runs with real processes: exact where they promise it, bounded where they do not."""

import json

import pytest
import torch
from safetensors.torch import load_file

from vla3_plugin.telemetry.trace import read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# the same mathematics with and without the stages: what a streamed batch cannot have is given up in both
SAME = ["vla3.algorithm.mini_batches=episodes", "vla3.algorithm.advantage_statistics=mini_batch"]
ON = [f"vla3.stages.{stage}.enabled=true" for stage in ("interaction", "streaming", "training")]
GRPO = [
    "vla3.algorithm.adv_type=grpo", "vla3.algorithm.loss_type=actor", "vla3.algorithm.group_size=4",
    "vla3.algorithm.logprob_type=token", "vla3.algorithm.update_epoch=1",
]  # fmt: skip
KINDS = {"ppo": [], "previous": ["vla3.algorithm.advantage_statistics=previous"], "grpo": GRPO}
SHORT = ["trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.val_before_train=false"]


def weights(run, step=3):
    assert run.status == 0, run.output[-3000:]
    return load_file(run.directory / "checkpoints" / f"global_step_{step}" / "policy" / "model.safetensors")


def assert_same_policy(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


NOTHING_LEFT = {"replay": [], "groups": [], "dropped": {}, "dropped_groups": []}


@pytest.fixture(scope="module")
def synchronous(launch, line, tmp_path_factory):
    runs = {}

    def get(kind):
        if kind not in runs:
            extra = KINDS[kind]
            runs[kind] = launch(tmp_path_factory.mktemp(kind) / "run", *line, *SAME, *SHORT, *extra)
        return runs[kind]

    return get


# GRPO on two learner ranks is further below
@pytest.mark.parametrize(
    "kind", ["ppo", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("previous", "grpo"))]
)
def test_all_stages_at_lag_0_learn_what_the_synchronous_run_learns(synchronous, launch, line, tmp_path, kind):
    """Two mini-batches; PPO with a critic and two epochs, GRPO at token level: the same parameters in the end."""
    run = launch(
        tmp_path / "run", *line, *SAME, *SHORT, *KINDS[kind], *ON, "vla3.stages.training.max_staleness=0",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10",
    )  # fmt: skip
    assert_same_policy(weights(synchronous(kind)), weights(run))
    assert all(row["staleness/max"] == 0 for row in run.metrics)


@pytest.mark.long  # of whole runs with such env workers one is in every test run: rollout/test_hosting.py
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([], id="one clock"),
        pytest.param([*ON, "vla3.stages.training.max_staleness=0"], id="three"),
    ],
)
def test_env_workers_in_their_policys_process_learn_what_they_learn_in_their_own(
    synchronous, launch, line, tmp_path, stages
):
    """Simulators in child interpreters, and in that process too; no observation crosses from env to policy worker."""
    inline = ["vla3.env.isolation=none", "vla3.env.shards_per_worker=1"] if stages else []
    run = launch(tmp_path / "run", *line, *SAME, *SHORT, *stages, "vla3.env.host=policy_worker", *inline)
    assert_same_policy(weights(synchronous("ppo")), weights(run))
    theirs = synchronous("ppo").metrics
    for row, other in zip(run.metrics, theirs, strict=True):
        assert row["traffic/data/env_to_policy"] == row["traffic/data/policy_to_env"] == 0
        assert other["traffic/data/env_to_policy"] > 0 < other["traffic/data/policy_to_env"]
        crossed = row["traffic/data/simulator_to_env"]
        assert crossed == 0 if inline else crossed > 0


def test_a_token_policy_at_lag_0_learns_what_it_learns_synchronously(launch, toy_record, tmp_path):
    """OpenVLA-OFT's nano policy from fresh weights; tokens are discrete, so other weights would play other episodes."""
    tokens = [
        "vla3.env.name=toy", "~vla3.env.options.task", "vla3.env.envs_per_shard=3", "data.train_batch_size=16",
        f"actor_rollout_ref.model.options.processing={toy_record}", "vla3.algorithm.num_mini_batches=2",
        "trainer.test_freq=-1",
    ]  # fmt: skip
    one, three = (
        launch(tmp_path / name, *tokens, *GRPO, *SAME, *SHORT, *more, recipe="vla3_maniskill_openvla_oft")
        for name, more in (
            ("synchronous", ["vla3/stages@_global_=synchronous"]),
            ("asynchronous", [
                "vla3.stages.training.max_staleness=0", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10"
            ]),
        )
    )  # fmt: skip
    assert_same_policy(weights(one), weights(three))
    for mine, other in zip(one.metrics, three.metrics, strict=True):
        assert other["staleness/max"] == 0
        assert mine["env/return/mean"] == pytest.approx(other["env/return/mean"], abs=1e-6)


def test_two_learner_ranks_with_uneven_micro_batches_learn_what_one_learns(synchronous, launch, line, tmp_path):
    """Micro-batches of 7 on two FSDP ranks, with a rest that does not divide: padded, and none waits for the other."""
    run = launch(
        tmp_path / "run", *line, *SAME, *SHORT, *GRPO, *ON, "vla3.stages.training.max_staleness=0",
        "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7",
    )  # fmt: skip
    assert_same_policy(weights(synchronous("grpo")), weights(run))


@pytest.mark.long
def test_a_reference_policy_beside_two_streaming_ranks_changes_nothing_either(launch, line, tmp_path):
    """It computes in the learner's processes: its collectives must not meet those of a micro-batch."""
    kl = [*GRPO, "vla3.algorithm.kl_beta=0.1"]
    one = launch(tmp_path / "one", *line, *SAME, *SHORT, *kl)
    two = launch(
        tmp_path / "two", *line, *SAME, *SHORT, *kl, *ON, "vla3.stages.training.max_staleness=0",
        "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7",
    )  # fmt: skip
    assert_same_policy(weights(one), weights(two))
    assert two.metrics[2]["actor/kl"] == pytest.approx(one.metrics[2]["actor/kl"], rel=1e-3)


@pytest.fixture(scope="module")
def asynchronous(launch, line, tmp_path_factory):
    """Eight steps with everything on and two of everything; GRPO in groups of four, some of them without spread."""
    return launch(
        tmp_path_factory.mktemp("asynchronous") / "run", *line, *SAME, *ON, *GRPO, "trainer.total_training_steps=8",
        "trainer.save_freq=4", "vla3.keep_checkpoints=5", "vla3.stages.training.max_staleness=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=2", "vla3.env.workers=2", "trainer.n_gpus_per_node=2",
        "vla3.algorithm.update_epoch=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7",
        "trainer.test_freq=3", "vla3.evaluation.episodes_per_task=24",
    )  # fmt: skip


def test_training_goes_on_while_a_version_is_evaluated(asynchronous):
    """Steps 3 and 6 are evaluated beside training, with weights that the policy workers keep; the first and the last
    are waited for. What newer weights had a part in would not count."""
    assert [e["step"] for e in asynchronous.evaluations] == [0, 3, 6, 8]
    assert [e["n"] for e in asynchronous.evaluations] == [24] * 4
    assert not any("of_other_versions" in e for e in asynchronous.evaluations)
    told = [row["step"] for row in asynchronous.metrics if "val/step" in row]
    assert told[-1] == 8 and told[0] > 3, "known later than the step that it is of"
    spans = read_trace(asynchronous.directory / "trace.json")
    evaluating = [span for span in spans if span.name == "evaluate"]
    learning = [span for span in spans if span.name in ("micro_batch", "update")]
    assert len(evaluating) >= 2
    assert any(a.start < b.end and b.start < a.end for a in evaluating for b in learning)


def test_no_trained_sample_is_older_than_the_bound_and_some_are_older_than_0(asynchronous):
    assert asynchronous.status == 0, asynchronous.output[-3000:]
    assert all(row["staleness/max"] <= 2 for row in asynchronous.metrics)
    assert any(row["staleness/max"] > 0 for row in asynchronous.metrics), "rollout went on while the learner trained"


def test_every_episode_of_the_plan_is_trained_on_once(asynchronous):
    assert [row["env/episodes"] for row in asynchronous.metrics] == [24.0] * 8
    assert not any(key.startswith("rollout/dropped") for row in asynchronous.metrics for key in row)
    state = json.loads((asynchronous.directory / "checkpoints" / "global_step_8" / "trainer.json").read_text())
    assert state["admission"] == {**NOTHING_LEFT, "next_group": 48}, "8 steps of 6 groups, none left over"


def test_every_step_reports_parity_lanes_and_batches(asynchronous):
    for role in ("env", "policy", "actor"):
        busy = [row[f"lanes/{role}/busy"] for row in asynchronous.metrics]
        assert 0 < max(busy) <= 1 + 1e-9, role
    assert max(row["rollout/batcher/batch_size/mean"] for row in asynchronous.metrics if row["lanes/policy/busy"]) >= 1
    assert asynchronous.metrics[0]["rollout/logprob_diff_max"] < 1e-4
    assert (asynchronous.directory / "trace.json").stat().st_size > 1000
    assert "swimlane" in (asynchronous.directory / "report.html").read_text().lower()


def test_a_resumed_asynchronous_run_plays_again_what_was_in_flight_and_skips_nothing(
    asynchronous, launch, line, tmp_path
):
    import shutil

    directory = tmp_path / "run"
    kept = directory / "checkpoints" / "global_step_4"
    shutil.copytree(asynchronous.directory / "checkpoints" / "global_step_4", kept)
    state = json.loads((kept / "trainer.json").read_text())["admission"]
    assert state["replay"], "groups were in flight when it was saved"
    assert len(state["replay"]) + 4 * 6 == state["next_group"], "what is neither trained nor in flight has not started"
    run = launch(
        directory, *line, *SAME, *ON, *GRPO, "trainer.total_training_steps=8", "trainer.save_freq=4",
        "vla3.keep_checkpoints=5", "vla3.stages.training.max_staleness=2", "trainer.resume_mode=auto",
        "trainer.val_before_train=false", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    assert run.status == 0, run.output[-3000:]
    assert [row["step"] for row in run.metrics] == [5, 6, 7, 8]
    state = json.loads((directory / "checkpoints" / "global_step_8" / "trainer.json").read_text())
    assert state["admission"] == {**NOTHING_LEFT, "next_group": 48}
