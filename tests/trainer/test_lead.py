"""How far ahead groups start, against a learner and a rollout of known speed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.trainer.admission import Admission
from vla3_plugin.trainer.lead import Lead

PER_STEP = 8


class Played:
    """A run on a clock of its own: ``slots`` groups play at a time, group i for ``length(i)`` seconds, none of them
    while ``pause`` = (first step, seconds) lasts; the learner takes one after the other, each for a second."""

    def __init__(self, just_in_time, length, slots, steps=80, bound=2, pause=(-1, 0.0)):
        admission = Admission(group_size=1, groups_per_step=PER_STEP, max_staleness=bound, just_in_time=just_in_time)
        clock, playing, free = 0.0, [], [0.0] * slots
        self.ages, self.took, self.leads = [], [], []
        for now in range(steps):
            began, of_step = clock, []
            if now == pause[0]:
                free = [max(slot, clock) + pause[1] for slot in free]
            admission.begin_step(now, clock)
            for _ in range(PER_STEP):
                asked = clock
                while True:
                    for index in admission.admit(now):
                        slot = free.index(min(free))
                        free[slot] = max(free[slot], clock) + length(index)
                        playing.append((free[slot], index, now))
                    for end, index, version in sorted(p for p in playing if p[0] <= clock):
                        playing.remove((end, index, version))
                        admission.finished({"episode": {"group_id": index}, "version": version, "keys": ["k"]})
                    chosen, _ = admission.take(PER_STEP, 1)
                    admission.waits(clock - asked, took=bool(chosen))
                    if chosen:
                        break
                    # the driver looks at least once a second
                    clock = min([clock + 1.0, *(end for end, _, _ in playing if end > clock)])
                of_step += [now - group.version for group in chosen]
                clock += 1.0
            admission.trained(clock)
            self.ages.append(of_step)
            self.took.append(clock - began)
            self.leads.append(admission.lead.groups if admission.lead else None)
        self.lead = admission.lead

    def age(self, since=30):
        return sum(map(sum, self.ages[since:])) / sum(map(len, self.ages[since:]))

    def step_s(self, since=30):
        return sum(self.took[since:]) / len(self.took[since:])


@pytest.mark.parametrize(("length", "slots"), [(1.0, 4), (4.0, 16), (8.0, 32)])
def test_a_learner_that_binds_trains_on_younger_samples_just_as_fast(length, slots):
    """With all that the bound allows, samples are two versions old; just in time about one, without a wait."""
    early = Played(False, lambda _: length, slots)
    just = Played(True, lambda _: length, slots)
    assert early.age() == 2
    assert just.age() < 1.5
    assert just.step_s(since=1) <= 1.01 * PER_STEP


@pytest.mark.parametrize(("length", "slots", "bound"), [(32.0, 64, 6), (20.0, 24, 4), (16.0, 20, 3)])
def test_episodes_that_last_several_steps_do_not_make_it_swing(length, slots, bound):
    """What fewer groups change shows only when they are due: judged every step, the lead fell until a step took 33
    times as long."""
    early = Played(False, lambda _: length, slots, bound=bound)
    just = Played(True, lambda _: length, slots, bound=bound)
    assert just.step_s(since=12) <= 1.03 * early.step_s(since=12)
    assert sum(just.took) - sum(early.took) <= 2 * length, "what finding it costs, once"
    assert max(just.took[2 * bound :]) <= 2 * PER_STEP
    assert just.age() <= early.age()


def test_where_rollout_binds_the_bound_alone_holds():
    just = Played(True, lambda _: 16.0, 4)
    assert just.leads[3:] == [just.lead.most] * 77
    early = Played(False, lambda _: 16.0, 4)
    assert just.took == early.took, "from the first step on"
    assert just.ages[4:] == early.ages[4:]


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_uneven_episodes_cost_little_more_than_with_all_that_the_bound_allows(bound):
    def heavy(index):
        return min(40.0, 2 * random.Random(index).paretovariate(1.5))

    early = Played(False, heavy, 16, steps=300, bound=bound)
    just = Played(True, heavy, 16, steps=300, bound=bound)
    assert just.step_s() <= 1.05 * early.step_s()
    assert just.age() <= early.age()


def test_a_rollout_that_pauses_has_its_lead_back_within_the_step():
    just = Played(True, lambda _: 1.0, 4, pause=(40, 6.0))
    assert just.leads[38] < PER_STEP
    assert just.leads[40] > just.leads[38], "as soon as it waits"
    assert just.took[40] <= PER_STEP + 6.0 and just.took[41] == PER_STEP
    assert min(just.leads[41:60]) >= just.leads[40], "it is not tried again soon"
    assert just.leads[-1] < just.leads[40], "but later"


def steps(lead, *finds, step_s=8.0, at=0.0):
    """Steps of ``step_s`` seconds, each with what the learner found in it: (seconds waited, finished groups left)."""
    for step in finds:
        lead.step_begins(at)
        for waited, left in step:
            lead.waits(waited)
            lead.took(left)
        at += step_s
        lead.step_ends(at)
    return lead.groups


QUIET = [(0.0, 10), (0.0, 4), (0.0, 9)]  # at the worst moment of it four are left over; two are the reserve


def test_it_shrinks_by_what_was_left_over_at_the_worst_moment_of_a_window_of_steps():
    lead = Lead(PER_STEP, 2)
    assert lead.groups == 10, "a step's and the reserve"
    assert steps(lead, QUIET, QUIET) == 10, "a window is three steps"
    assert steps(lead, QUIET) == 8
    assert steps(lead, QUIET, [(0.0, 9)], [(0.0, 7)]) == 6
    assert steps(lead, *[[(0.0, 2)]] * 3) == 6, "that is the reserve"


@pytest.mark.parametrize(
    ("waits", "expected"),
    [([0.07], 20), ([0.04, 0.03], 20), ([0.09], 21), ([0.05, 0.04], 21), ([2.0], 22), ([1.0, 1.0], 22), ([8.0], 24)],
)
def test_it_grows_by_what_the_learner_would_have_taken_while_it_waited_in_all_of_the_step(waits, expected):
    """A hundredth of a step is tolerated, however many waits it is made of."""
    lead = Lead(PER_STEP, 2)
    lead.groups = 20
    steps(lead, [(0.0, 2)])
    assert steps(lead, [(waited, 2) for waited in waits]) == expected


def test_the_first_steps_wait_says_nothing():
    lead = Lead(PER_STEP, 2)
    assert steps(lead, [(50.0, 2)]) == 10
    assert steps(lead, [(0.0, 6)], [(0.0, 6)]) == 10
    assert steps(lead, *[[(0.0, 6)]] * 3) == 6


def test_it_grows_while_the_learner_waits_and_not_only_afterwards():
    lead = Lead(PER_STEP, 2)
    lead.groups = 10
    steps(lead, [(0.0, 2)])
    lead.step_begins(8.0)
    seen = []
    for seconds in (0.05, 1.0, 2.0, 3.0):
        lead.waits(seconds)
        seen.append(lead.groups)
    assert seen == [10, 11, 12, 13]


def test_a_window_with_a_wait_does_not_shrink_it_though_groups_are_left_over():
    """One that must be in the step is late: fewer started early would make the next such one later still."""
    lead = Lead(PER_STEP, 2)
    lead.groups = lead.most
    assert steps(lead, QUIET, [(4.0, 10)], QUIET) == 24
    assert steps(lead, QUIET, QUIET, QUIET) == 22, "at all that is allowed a wait is no fault of the lead's"


def test_a_lead_that_was_too_small_is_not_gone_below_for_twenty_steps():
    lead = Lead(PER_STEP, 2)
    lead.groups = 12
    assert steps(lead, QUIET, [(2.0, 0)], QUIET) == 14
    left = [[(0.0, 12)]]
    assert steps(lead, *left * 18) == 14
    assert steps(lead, *left * 3) < 14


@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1e3), st.floats(0, 1e3)), max_size=60),
)
def test_it_never_leaves_what_the_bound_allows_nor_stops_everything(per_step, bound, found):
    lead = Lead(per_step, bound)
    at = 0.0
    for left, waited, step_s in found:
        lead.step_begins(at)
        lead.waits(waited)
        assert 1 <= lead.groups <= (bound + 1) * per_step
        lead.took(left)
        at += step_s
        lead.step_ends(at)
        assert 1 <= lead.groups <= (bound + 1) * per_step
