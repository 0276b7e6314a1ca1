"""The staleness bound, against random finishing orders and late publications."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.trainer.admission import Admission


def summary(episode, group, version, samples=1):
    keys = [f"{episode}/{i}" for i in range(samples)]
    return {"episode": {"episode_id": episode, "group_id": group}, "version": version, "keys": keys}


def start(**options):
    return Admission(**{"group_size": 1, "groups_per_step": 4, "max_staleness": 1} | options)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    group_size=st.integers(1, 3),
    per_step=st.integers(1, 5),
    bound=st.integers(0, 3),
    steps=st.integers(1, 6),
)
def test_every_group_is_trained_once_in_time_whatever_finishes_first(data, group_size, per_step, bound, steps):
    """Random finishing orders, publications up to a step late, nothing ever dropped, no wait without an end; however
    few groups may start early."""
    admission = start(
        group_size=group_size, groups_per_step=per_step, max_staleness=bound, total=steps * per_step, just_in_time=True
    )
    published, playing, trained, peak = 0, [], [], 0
    for now in range(steps):
        admission.begin_step(now)
        if admission.lead is not None:
            admission.lead.groups = data.draw(st.integers(1, admission.lead.most))
        lag = data.draw(st.integers(0, min(1, bound)))
        for idle in range(10_000):
            published = max(published, now - lag)
            for group in admission.admit(published):
                playing += [(group * group_size + k, group, published) for k in range(group_size)]
            peak = max(peak, admission.waiting)
            samples = data.draw(st.sampled_from([1, 2 * group_size, math.inf]))
            chosen, stale = admission.take(per_step, samples)
            assert not stale
            for group in chosen:
                assert len(group.trajectories) == group_size
                assert now - bound <= group.version <= now
                trained.append(group.index)
            if len(admission.taken) == per_step:
                break
            if chosen:
                continue  # more may be ready, and what was taken makes room
            assert playing, f"the step waits for groups, and none is being played ({idle})"
            admission.finished(summary(*playing.pop(data.draw(st.integers(0, len(playing) - 1)))))
        assert len(admission.taken) == per_step
    assert sorted(trained) == list(range(steps * per_step)), "each group of the plan once"
    assert peak <= (bound + 1) * per_step
    assert not playing and not admission.waiting and not admission.dropped


def test_a_step_takes_no_more_groups_at_a_time_than_have_the_samples_asked_for():
    """The learner begins on them while the next ones are prepared."""
    admission = start()
    admission.begin_step(0)
    for group in admission.admit(published=0)[:4]:
        admission.finished(summary(group, group, 0, samples=10))
    taken = [[g.index for g in admission.take(4, samples)[0]] for samples in (11, 1, math.inf)]
    assert taken == [[0, 1], [2], [3]]


def test_without_staleness_a_step_takes_its_groups_of_the_plan_and_nothing_starts_ahead():
    admission = start(max_staleness=0)
    admission.begin_step(0)
    assert admission.admit(published=0) == [0, 1, 2, 3]
    assert admission.admit(published=0) == []
    for group in (3, 2, 0):
        admission.finished(summary(group, group, 0))
    assert [g.index for g in admission.take(2)[0]] == [0], "the first mini-batch is groups 0 and 1"
    admission.finished(summary(1, 1, 0))
    assert [g.index for g in admission.take(2)[0]] == [1]
    assert [g.index for g in admission.take(4)[0]] == [2, 3]
    assert admission.admit(published=0) == [], "the next step's groups wait for the next version"
    admission.begin_step(1)
    assert admission.admit(published=0) == []
    assert admission.admit(published=1) == [4, 5, 6, 7]


def test_a_step_waits_for_a_straggler_that_would_be_too_old_in_the_next():
    admission = start()
    admission.begin_step(0)
    assert admission.admit(published=0) == list(range(8))
    for group in (4, 5, 6, 7):
        admission.finished(summary(group, group, 0))
    assert [g.index for g in admission.take(4)[0]] == [4, 5, 6, 7], "the first to finish"
    admission.begin_step(1)
    assert admission.admit(published=1) == [8, 9, 10, 11]
    for group in (8, 9, 10, 1):
        admission.finished(summary(group, group, 1))
    assert [g.index for g in admission.take(4)[0]] == [1], "all four places belong to groups 0 to 3"


def test_groups_made_by_a_replica_that_lagged_are_dropped_and_counted_and_replaced():
    admission = start(groups_per_step=1, max_staleness=1, total=3)
    admission.begin_step(5)
    assert admission.admit(published=5) == [0, 1]
    admission.finished(summary(0, 0, 3))
    chosen, stale = admission.take(1)
    assert (chosen, [g.index for g in stale]) == ([], [0])
    assert admission.dropped == {"stale": 1}
    assert admission.admit(published=5) == [2], "in place of the dropped one"


def test_groups_in_flight_are_played_again_after_a_restart():
    admission = start(groups_per_step=2)
    admission.begin_step(0)
    assert admission.admit(published=0) == [0, 1, 2, 3]
    for group in (1, 2):
        admission.finished(summary(group, group, 0))
    assert [g.index for g in admission.take(2)[0]] == [1, 2]
    state = admission.state()
    assert state == {"next_group": 4, "replay": [0, 3]}
    again = start(groups_per_step=2, **state)
    again.begin_step(1)
    assert again.admit(published=1) == [0, 3, 4, 5]


@pytest.mark.parametrize("published", [-3, 0])
def test_nothing_is_admitted_under_a_version_that_would_be_too_old_before_it_is_used(published):
    admission = start(max_staleness=1)
    admission.begin_step(2)
    assert admission.admit(published) == []


def test_a_step_that_is_given_up_loses_no_finished_group():
    admission = Admission(group_size=1, groups_per_step=2, max_staleness=0)
    admission.begin_step(0)
    for index in admission.admit(0):
        admission.finished({"episode": {"group_id": index}, "version": 0, "keys": []})
    chosen, _ = admission.take(1)
    assert [g.index for g in chosen] == [0]
    admission.give_back()
    assert sorted(admission.ready) == [0, 1] and admission.taken == []
    assert admission.state() == {"next_group": 2, "replay": [0, 1]}
    assert [g.index for g in admission.take(2)[0]] == [0, 1], "it can be taken again"


def test_a_group_that_lost_an_episode_is_dropped_whole_and_another_takes_its_place():
    admission = Admission(group_size=2, groups_per_step=1, max_staleness=0, total=2)
    admission.begin_step(0)
    assert admission.admit(0) == [0]
    assert admission.finished({"episode": {"group_id": 0}, "version": 0, "keys": ["0_0"]}) == []
    dropped = admission.finished({"episode": {"group_id": 0}, "quarantined": "crashes"})
    assert [g.index for g in dropped] == [0] and dropped[0].trajectories[0]["keys"] == ["0_0"]
    assert admission.dropped == {"quarantined": 1} and admission.dropped_groups == [0]
    assert admission.admit(0) == [1], "within the run's total"


def test_a_stop_between_two_steps_gives_nothing_back_that_was_trained_on():
    """Their samples are gone from the store, and they would be trained on twice."""
    admission = Admission(group_size=1, groups_per_step=2, max_staleness=0)
    admission.begin_step(0)
    for index in admission.admit(0):
        admission.finished({"episode": {"group_id": index}, "version": 0, "keys": []})
    admission.take(2)
    admission.trained()
    admission.give_back()
    assert not admission.ready
    assert admission.state() == {"next_group": 2, "replay": []}
