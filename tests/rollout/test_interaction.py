"""The interaction loop over the toy environment in process: order and number of slots change nothing."""

import numpy as np
import pytest
from toy_play import play


@pytest.fixture(scope="module")
def one():
    return play(1, 1)


@pytest.mark.parametrize(("envs", "slots"), [(1, 4), (3, 1), (2, 3), (20, 1)])
def test_trajectories_do_not_depend_on_the_number_of_environments(one, envs, slots):
    other = play(envs, slots)
    assert other.keys() == one.keys()
    for index, trajectory in one.items():
        assert other[index].success == trajectory.success
        for name, array in trajectory.samples.items():
            np.testing.assert_array_equal(array, other[index].samples[name], err_msg=f"episode {index}, {name}")


def test_every_episode_is_played_once_and_names_its_samples(one):
    assert sorted(one) == list(range(60))
    keys = [key for t in one.values() for key in t.keys()]
    assert len(keys) == len(set(keys)) == sum(len(t) for t in one.values())


def test_truncated_episodes_carry_the_value_of_their_final_observation(one):
    """And of no other: the bootstrap is at the chunk that was cut, and nowhere where the task ended by itself."""
    truncated = [t for t in one.values() if t.samples["truncated"].any()]
    assert 0 < len(truncated) < len(one), "random actions must fail sometimes, and sometimes not"
    for trajectory in one.values():
        bootstrap, state = trajectory.samples["bootstrap"], trajectory.samples["in.state"]
        assert not bootstrap[:-1].any()
        assert bootstrap[-1].any() == trajectory.samples["truncated"].any()
        if trajectory.samples["truncated"].any():
            assert bootstrap[-1, 0] != pytest.approx(state[-1].sum()), "the value before the last chunk"


def test_steps_after_the_end_inside_a_chunk_are_not_valid(one):
    """max_steps 10 in chunks of 4: a truncated episode ends at the second step of its third chunk."""
    for trajectory in (t for t in one.values() if t.samples["truncated"].any()):
        assert trajectory.samples["valid"].tolist()[-1] == [True, True, False, False]
        assert trajectory.control_steps == 10


def test_only_asked_for_episodes_are_filmed_with_every_control_step(one):
    assert len(one[2].frames) == one[2].control_steps + 1
    assert not one[1].frames


def test_evaluation_asks_for_no_bootstrap_values():
    evaluated = play(2, 2, mode="eval")
    assert all(not t.samples["bootstrap"].any() for t in evaluated.values())


def test_bootstrap_type_always_asks_for_the_value_of_every_final_observation(one):
    every = play(1, 2, always=True)
    assert any(t.samples["terminated"].any() for t in every.values()), "some episodes end by themselves"
    assert all(t.samples["bootstrap"][-1].any() for t in every.values())
    for index, trajectory in one.items():
        np.testing.assert_array_equal(trajectory.samples["rewards"], every[index].samples["rewards"])
