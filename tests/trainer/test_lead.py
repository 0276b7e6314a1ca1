"""How far ahead groups start, against a learner and a rollout of known speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.trainer.admission import Admission
from vla3_plugin.trainer.lead import Lead

PER_STEP = 8


def played(just_in_time, steps, group_s, learn_s, slots, bound=2):
    """(ages of the groups of each step, how long each step took, the lead in the end). ``slots`` groups play at a time,
    each for ``group_s``; the learner takes one group after the other, each for ``learn_s``."""
    admission = Admission(group_size=1, groups_per_step=PER_STEP, max_staleness=bound, just_in_time=just_in_time)
    clock, playing, queue, ages, took = 0.0, [], [], [], []
    free = [0.0] * slots
    for now in range(steps):
        admission.begin_step(now, clock)
        began, of_step = clock, []
        for _ in range(PER_STEP):
            asked = clock
            while True:
                queue += [(index, now) for index in admission.admit(now)]
                for index, version in queue:
                    slot = free.index(min(free))
                    free[slot] = max(free[slot], clock) + group_s
                    playing.append((free[slot], index, version))
                queue = []
                for end, index, version in sorted(p for p in playing if p[0] <= clock):
                    playing.remove((end, index, version))
                    summary = {"episode": {"group_id": index}, "version": version, "keys": ["k"]}
                    admission.finished(summary)
                chosen, _ = admission.take(PER_STEP, 1)
                if chosen:
                    break
                clock = min(p[0] for p in playing)
            admission.took(clock - asked)
            of_step += [now - group.version for group in chosen]
            clock += learn_s
        ages.append(of_step)
        took.append(clock - began)
    return ages, took, admission.lead


def mean(rows):
    return sum(map(sum, rows)) / sum(map(len, rows))


@pytest.mark.parametrize(("group_s", "slots"), [(1.0, 4), (4.0, 16), (8.0, 32)])
def test_a_learner_that_binds_trains_on_younger_samples_just_as_fast(group_s, slots):
    """With all that the bound allows, samples are two versions old; just in time about one, without a wait."""
    early, _, _ = played(False, 30, group_s, 1.0, slots)
    ages, took, _ = played(True, 30, group_s, 1.0, slots)
    assert mean(early[10:]) == 2
    assert mean(ages[10:]) < 1.5
    assert sum(took[10:]) <= 1.01 * 20 * PER_STEP


def test_where_rollout_binds_the_bound_alone_holds():
    ages, took, lead = played(True, 30, 8.0, 0.1, 4)
    assert lead.groups == lead.most
    assert (ages, took) == played(False, 30, 8.0, 0.1, 4)[:2]


def test_a_learner_that_becomes_faster_has_its_lead_back_in_a_few_steps():
    _, took, lead = played(True, 20, 1.0, 1.0, 4)
    assert lead.groups < PER_STEP
    at = sum(took)
    for _ in range(4):
        lead.step_begins(at)
        lead.took(0, 8.0)
        at += 10.0
    lead.step_begins(at)
    assert lead.groups == lead.most


def test_a_step_that_took_nothing_says_nothing():
    lead = Lead(PER_STEP, 1)
    for at in (0.0, 1.0, 50.0):
        lead.step_begins(at)
    assert lead.groups == lead.most


@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1e3), st.floats(0, 1e3)), max_size=30),
)
def test_it_never_leaves_what_the_bound_allows_nor_stops_everything(per_step, bound, found):
    lead = Lead(per_step, bound)
    at = 0.0
    for left, waited, step_s in found:
        lead.took(left, waited)
        at += step_s
        lead.step_begins(at)
        assert 1 <= lead.groups <= (bound + 1) * per_step
