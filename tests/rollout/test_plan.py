"""The episode plan: no episode skipped or repeated, groups share what they must, evaluation never meets training."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.contract import EnvSpec
from vla3_plugin.rollout.plan import EpisodePlan, evaluation_episodes, split_init_states

plans = st.builds(
    EpisodePlan,
    seed=st.integers(0, 1000),
    tasks=st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True),
    init_states=st.lists(st.integers(0, 50), max_size=6, unique=True),
    group_size=st.integers(1, 4),
)


@given(plans, st.integers(0, 3))
def test_a_pass_visits_every_task_and_initial_state_once(plan, pass_index):
    pairs = len(plan.tasks) * max(1, len(plan.init_states))
    start = pass_index * pairs * plan.group_size
    groups = {e.group_id: (e.task_id, e.init_state_id) for e in plan.episodes(start, pairs * plan.group_size)}
    assert len(groups) == pairs
    assert max(Counter(groups.values()).values()) == 1


@given(plans, st.integers(0, 100))
def test_members_of_a_group_share_task_initial_state_and_seed(plan, group):
    members = plan.episodes(group * plan.group_size, plan.group_size)
    assert len({(e.task_id, e.init_state_id, e.seed, e.group_id) for e in members}) == 1
    assert len({e.episode_id for e in members}) == plan.group_size


@given(plans, st.integers(0, 50), st.integers(1, 20))
def test_an_episode_depends_on_its_index_alone(plan, start, count):
    """However a stretch is cut into steps or dealt to workers, it is the same stretch: a cursor is enough to resume."""
    assert plan.episodes(start, count) == [plan.episode(start + i) for i in range(count)]


def test_evaluation_seeds_and_ids_are_never_trained_on():
    plan = EpisodePlan(seed=0, tasks=[0], init_states=[], group_size=1)
    training = plan.episodes(0, 5000)
    held_out = evaluation_episodes([0], [], 500, seed=0)
    assert not {e.seed for e in training} & {e.seed for e in held_out}
    assert not {e.episode_id for e in training} & {e.episode_id for e in held_out}
    assert len({e.seed for e in held_out}) == 500


def test_evaluation_covers_the_initial_states_of_every_task_in_order():
    episodes = evaluation_episodes([3, 7], [40, 41, 42], 4, seed=1)
    assert [e.task_id for e in episodes] == [3] * 4 + [7] * 4
    assert [e.init_state_id for e in episodes] == [40, 41, 42, 40] * 2


def _spec(states: int) -> EnvSpec:
    return EnvSpec("e", {}, ["x"], ["a"], [-1.0], [1.0], 10, 10.0, "s", num_init_states=states)


def test_held_out_initial_states_are_disjoint_from_training():
    train, held_out = split_init_states(_spec(50), 10)
    assert len(train) == 40 and len(held_out) == 10 and not set(train) & set(held_out)


@pytest.mark.parametrize("held_out", [-1, 50, 99])
def test_holding_out_everything_is_refused_by_name(held_out):
    with pytest.raises(ValueError, match="vla3.env.held_out_init_states"):
        split_init_states(_spec(50), held_out)
