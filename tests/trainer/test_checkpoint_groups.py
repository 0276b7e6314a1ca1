"""A restart in the middle of asynchronous training: what had finished is trained on once, the rest is played again."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.rollout.plan import EpisodePlan
from vla3_plugin.telemetry.metrics import Evaluation, SuccessTable, read_metrics
from vla3_plugin.telemetry.timeline import Timeline
from vla3_plugin.trainer import checkpoint_groups
from vla3_plugin.trainer.admission import Admission
from vla3_plugin.trainer.feeder import Feeder
from vla3_plugin.trainer.record import RunRecord

SIZE = 2


def summary(episode, version, chunks=2):
    return {
        "episode": {"episode_id": episode, "group_id": episode // SIZE},
        "version": version,
        "versions": [version] * chunks,
        "keys": [f"{episode}_{i}" for i in range(chunks)],
    }


def fresh(state=None, **options):
    settings = {"group_size": SIZE, "groups_per_step": 2, "max_staleness": 1} | options
    if state is None:
        return Admission(**settings)
    again = Admission(**settings, next_group=state["next_group"], replay=state["replay"])
    checkpoint_groups.restore(again, state)
    return again


def through_a_file(admission):
    return json.loads(json.dumps(checkpoint_groups.state_of(admission)))


def interrupted():
    """Groups 0 and 2 trained on; 1 ready, 3 half finished, 4 without a finished episode, 5 with one given up."""
    admission = fresh(max_staleness=2)
    admission.begin_step(7)
    assert admission.admit(published=7) == list(range(6))
    for episode in (0, 1, 4, 5):
        admission.finished(summary(episode, 7))
    assert [g.index for g in admission.take(2)[0]] == [0, 2]
    for episode in (2, 3, 6):
        admission.finished(summary(episode, 7))
    admission.finished({**summary(10, 7), "quarantined": True})
    admission.finished(summary(11, 7))  # its group is dropped
    admission.dropped["stale"] = 3
    return admission


def test_where_samples_were_made_is_forgotten_with_the_run_that_made_them():
    """They are restored by one process; a learner rank that was given them for being near had to fetch them."""
    admission = fresh()
    admission.begin_step(0)
    admission.admit(published=0)
    admission.finished(summary(0, 0) | {"node": "here"})
    (group,) = fresh(through_a_file(admission)).started.values()
    assert group.trajectories == [summary(0, 0)]


def test_finished_episodes_survive_with_their_versions_and_counters():
    again = fresh(through_a_file(interrupted()), max_staleness=2)
    assert [(g.index, g.admitted_under, g.version, len(g.trajectories)) for g in again.ready.values()] == [(1, 7, 7, 2)]
    assert [(g.index, len(g.trajectories)) for g in again.started.values()] == [(3, 1)]
    assert again.replay == [4] and again.next_group == 6
    assert again.dropped == {"quarantined": 1, "stale": 3}
    assert again.dropped_groups == [5], "the ledger has yet to hear of it"
    assert again.admitted == 2, "the bound on what the rest of the run will play counts them"


def test_only_what_is_missing_is_played():
    again = fresh(through_a_file(interrupted()), max_staleness=2)
    plan = EpisodePlan(0, [0], [], group_size=SIZE)
    assert [e.episode_id for e in checkpoint_groups.unfinished(again, plan)] == [7]
    submitted = []
    interaction = SimpleNamespace(
        on_failure=lambda callback: None,
        submit=lambda wanted, done: submitted.extend(a.episode.episode_id for a in wanted),
    )
    feeder = Feeder(interaction, plan, again, True, Timeline("driver"), lambda groups: None, 30.0)
    assert submitted == [7]
    again.begin_step(8)
    feeder.published(8)
    assert submitted[:3] == [7, 8, 9], "then the groups that start again, then the plan goes on"
    assert feeder.state()["groups"] == checkpoint_groups.state_of(interrupted())["groups"]


def test_samples_that_are_too_old_after_the_restart_are_dropped_and_counted():
    again = fresh(through_a_file(interrupted()), max_staleness=1)
    again.begin_step(9)
    chosen, stale = again.take(2)
    assert (chosen, [g.index for g in stale]) == ([], [1])
    assert again.dropped["stale"] == 4


def test_without_the_finished_episodes_every_group_is_played_from_the_start():
    state = checkpoint_groups.play_again(through_a_file(interrupted()))
    again = fresh(state)
    again.begin_step(8)
    assert again.admit(published=8)[:3] == [1, 3, 4] and not again.ready


@given(
    data=st.data(), size=st.integers(1, 3), per_step=st.integers(1, 3), bound=st.integers(0, 3), steps=st.integers(2, 6)
)
def test_killed_and_resumed_at_random_every_group_is_trained_on_once_and_no_finished_episode_is_lost(
    data, size, per_step, bound, steps
):
    """Checkpoints after each step, kills at random; the oracle is the run without any: each group of the plan once."""
    settings = {"group_size": size, "groups_per_step": per_step, "max_staleness": bound}
    admission = Admission(**settings, total=steps * per_step)
    plan = EpisodePlan(0, [0], [], group_size=size)
    playing: list[int] = []
    played: dict[int, int] = {}  # how often an episode finished in the history that counts
    trained: list[int] = []
    saved = (0, through_a_file(admission), {}, [])
    now, kills = 0, data.draw(st.integers(0, 3))
    while now < steps:
        admission.begin_step(now)
        while len(admission.taken) < per_step:
            for group in admission.admit(now):
                playing += range(group * size, (group + 1) * size)
            chosen, stale = admission.take(per_step)
            assert not stale
            for group in chosen:
                assert len({t["episode"]["episode_id"] for t in group.trajectories}) == size
                assert 0 <= now - group.version <= bound
                trained.append(group.index)
            if len(admission.taken) < per_step:
                episode = playing.pop(data.draw(st.integers(0, len(playing) - 1)))
                group_of = {"episode_id": episode, "group_id": episode // size}
                admission.finished({"episode": group_of, "version": now, "keys": []})
                played[episode] = played.get(episode, 0) + 1
        now += 1
        if data.draw(st.booleans()):
            saved = (now, through_a_file(admission), dict(played), list(trained))
        if kills and now < steps and data.draw(st.booleans()):
            kills -= 1
            now, state, played, trained = saved[0], saved[1], dict(saved[2]), list(saved[3])
            admission = Admission(
                **settings, next_group=state["next_group"], replay=state["replay"], total=(steps - now) * per_step
            )
            checkpoint_groups.restore(admission, json.loads(json.dumps(state)))
            playing = [e.episode_id for e in checkpoint_groups.unfinished(admission, plan)]
    assert sorted(trained) == list(range(steps * per_step))
    assert all(times == 1 for times in played.values()), "an episode that had finished is not played again"
    assert not admission.dropped


def rows(count, first):
    """Fields as the store has them: floats, integers, images, flags."""
    return {
        "in.pixels": torch.arange(count * 12, dtype=torch.uint8).reshape(count, 2, 2, 3) + first,
        "logprob": torch.full((count, 2, 1), float("nan")),
        "version.scalar": torch.full((count, 1), first),
        "valid": torch.tensor([[True, False]] * count),
    }


def test_samples_come_back_bit_for_bit_under_their_keys(tmp_path):
    state = through_a_file(interrupted())
    asked, back = [], {}

    def fetch(keys):
        asked.append(keys)
        return rows(len(keys), len(asked))

    checkpoint_groups.write_samples(tmp_path, state, fetch)
    checkpoint_groups.read_samples(tmp_path, state, lambda keys, found: back.update({tuple(keys): found}))
    assert asked == [["2_0", "2_1", "3_0", "3_1"], ["6_0", "6_1"]]
    for position, keys in enumerate(asked, 1):
        for name, tensor in rows(len(keys), position).items():
            torch.testing.assert_close(back[tuple(keys)][name], tensor, rtol=0, atol=0, equal_nan=True)


def test_a_file_of_another_number_of_samples_is_refused_by_name(tmp_path):
    state = through_a_file(interrupted())
    checkpoint_groups.write_samples(tmp_path, state, lambda keys: rows(1, 0))
    with pytest.raises(ValueError, match=r"group_1\.safetensors does not hold the 4 samples of group 1"):
        checkpoint_groups.read_samples(tmp_path, state, lambda keys, found: None)


def test_nothing_in_flight_is_no_file_and_no_question(tmp_path):
    checkpoint_groups.write_samples(tmp_path, through_a_file(fresh()), lambda keys: pytest.fail("asked"))
    checkpoint_groups.write_samples(tmp_path, {}, lambda keys: pytest.fail("asked"))
    assert list(tmp_path.iterdir()) == []


def evaluation(step, successes, mode="ode"):
    return Evaluation(step, "line", mode, SuccessTable({"go": (successes, 10)}), 0.0, 1.0)


def test_the_best_evaluation_is_known_again_after_a_restart(tmp_path):
    record = RunRecord(tmp_path)
    for step, successes in ((0, 2), (5, 7), (10, 7), (15, 6)):
        record.evaluation(evaluation(step, successes))
    record.evaluation(evaluation(15, 10, mode="sde"))
    partial = evaluation(12, 9)
    partial.extra["of_other_versions"] = 1
    record.evaluation(partial)
    assert record.best == {"step": 10, "rate": 0.7, "n": 10}, "of equals the later, and the noise-free policy counts"
    again = RunRecord(tmp_path)
    assert again.best == record.best
    assert again.best_of([5, 15]) == 5 and again.best_of([5, 10, 15]) == 10 and again.best_of([7]) is None
    again.resumed(5, {"step": 5, "rate": 0.7, "n": 10})
    assert again.best["step"] == 5, "what came later was taken back"


def test_the_row_of_a_step_that_was_saved_and_not_yet_written_down_is_written_on_resuming(tmp_path):
    """A kill between a step's checkpoint and its row left a gap in the curves."""
    record = RunRecord(tmp_path)
    for step in (1, 2):
        record.metrics.log(step, {"env/return/mean": step})
    RunRecord(tmp_path).resumed(3, None, {"env/return/mean": 3})
    RunRecord(tmp_path).resumed(3, None, {"env/return/mean": 30})
    RunRecord(tmp_path).resumed(2, None, {"env/return/mean": 20})
    assert [(row["step"], row["env/return/mean"]) for row in read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 3)]
    empty = tmp_path / "empty"
    RunRecord(empty).resumed(1, None, {"env/return/mean": 1})
    RunRecord(empty).resumed(1, None, None)
    assert [row["step"] for row in read_metrics(empty)] == [1]
    elsewhere = tmp_path / "elsewhere"
    RunRecord(elsewhere).resumed(4, None, {"env/return/mean": 4})
    assert read_metrics(elsewhere) == [], "a checkpoint of another run directory leaves no gap here"


def test_what_a_user_must_hear_of_stands_in_the_summary(tmp_path, capsys):
    record = RunRecord(tmp_path)
    record.start({"vla3": {}})
    record.note("checkpoint of step 2 could not be written")
    record.finish(True)
    assert "checkpoint of step 2" in capsys.readouterr().err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["notes"] == ["checkpoint of step 2 could not be written"] and summary["best_evaluation"] is None
