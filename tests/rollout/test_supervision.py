"""Simulators that fail: replaced, their episodes played again or given up, and nothing else changed."""

import queue
import subprocess
import sys
import threading

import numpy as np
import pytest
from toy_env import ToyEnv
from toy_play import act, play, prepare

from vla3_plugin.contract import Episode
from vla3_plugin.envs.process import EnvError
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue
from vla3_plugin.rollout.interaction import Interaction, Quarantined
from vla3_plugin.rollout.supervision import Limits, SupervisedEnv


class Fragile(ToyEnv):
    """Fails while it plays an episode of ``bad``, at its reset or in its second chunk; ``left`` counts over all."""

    def __init__(self, bad=(), at="chunk", left=None, **options):
        super().__init__(**options)
        self.bad, self.at, self.left = bad, at, left if left is not None else [10**9]
        self.there, self.chunks, self.closed = {}, {}, False

    def _fail(self, episode_id, at):
        if at == self.at and episode_id in self.bad and self.left[0] > 0:
            self.left[0] -= 1
            raise EnvError(f"physics exploded in episode {episode_id}")

    def reset(self, slot, episode):
        self._fail(episode.episode_id, "reset")
        self.there[slot], self.chunks[slot] = episode.episode_id, 0
        return super().reset(slot, episode)

    def chunk_step(self, slots, actions, record=False):
        for slot in slots:
            self.chunks[slot] += 1
            if self.chunks[slot] == 2:
                self._fail(self.there[slot], "chunk")
        return super().chunk_step(slots, actions, record)

    def close(self):
        self.closed = True
        super().close()


def run(bad, envs=2, slots=3, at="chunk", left=None, limits=None, episodes=60, group_size=1):
    events, made, limits = [], [], limits or Limits()

    def make():
        made.append(Fragile(bad, at, left, num_slots=slots, max_steps=10))
        return made[-1]

    supervised = [SupervisedEnv(make, limits, events.append) for _ in range(envs)]
    interaction = Interaction(supervised, prepare, act, seed=3, attempts=limits.attempts)
    plan = [Episode(i, i % 2, 0, 100 + i, i // group_size) for i in range(episodes)]
    source = EpisodeQueue([Assignment(e) for e in plan], closed=True)
    played, given_up = {}, []
    try:
        for item in interaction.run(source):
            if isinstance(item, Quarantined):
                given_up.append(item.assignment.episode.episode_id)
            else:
                index = item.trajectory.episode.episode_id
                assert index not in played, "an episode came twice"
                played[index] = item.trajectory
    finally:
        interaction.close()
    return played, given_up, events, made


@pytest.mark.parametrize("at", ["reset", "chunk"])
@pytest.mark.parametrize(("envs", "slots"), [(1, 1), (2, 3), (1, 6)])
def test_after_a_crash_every_episode_is_what_it_would_have_been(at, envs, slots):
    """Noise is keyed by the episode and the plan assigns its seed, so a replay is the same episode."""
    undisturbed = play(1, 1)
    played, given_up, events, made = run({7, 8, 31}, envs, slots, at, left=[2])
    assert not given_up and sorted(played) == list(range(60))
    for index, trajectory in undisturbed.items():
        for name, array in trajectory.samples.items():
            np.testing.assert_array_equal(array, played[index].samples[name], err_msg=f"episode {index}, {name}")
    assert len(events) == 2 and all(e["kind"] == "env_replaced" and "exploded" in e["why"] for e in events)
    assert sum(not env.closed for env in made) == 0, "a replaced simulator is closed, and so are the last ones"


@pytest.mark.parametrize("at", ["reset", "chunk"])
@pytest.mark.parametrize("slots", [1, 4])
def test_only_the_episode_that_fails_every_time_is_given_up(at, slots):
    played, given_up, events, _ = run({13}, 2, slots, at)
    assert given_up == [13]
    assert sorted(played) == [i for i in range(60) if i != 13]
    assert len(events) == Limits().attempts, "one simulator an attempt"


def test_two_bad_episodes_side_by_side_take_no_third_one_with_them():
    played, given_up, _, _ = run({0, 3}, 1, 6)
    assert sorted(given_up) == [0, 3]
    assert len(played) == 58


@pytest.mark.parametrize("slots", [1, 3])
def test_a_group_whose_initial_state_takes_simulators_down_is_given_up_and_not_taken_for_a_broken_simulator(slots):
    played, given_up, events, _ = run(set(range(8, 16)), 1, slots, group_size=8)
    assert sorted(given_up) == list(range(8, 16)) and len(played) == 52
    assert len(events) < Limits().failures, "siblings are not played once one of them was given up"


def test_with_a_single_attempt_nobody_is_given_up_for_what_a_neighbour_did():
    played, given_up, _, _ = run({13}, 2, 4, limits=Limits(attempts=1))
    assert given_up == [13] and len(played) == 59


def test_a_simulator_that_always_fails_ends_the_run_and_says_so():
    with pytest.raises(EnvError, match=r"failed 5 times.*vla3\.env\.max_failures = 5.* exploded"):
        run(set(range(60)), 1, 1, limits=Limits(failures=5))


def test_a_simulator_that_cannot_be_replaced_ends_the_run(monkeypatch):
    monkeypatch.setattr("vla3_plugin.rollout.supervision._PAUSE_S", 0.0)
    started = []

    def make():
        started.append(1)
        if len(started) > 1:
            raise EnvError("no memory")
        return Fragile({0}, "reset", num_slots=1)

    env = SupervisedEnv(make, Limits(), lambda event: None)
    with pytest.raises(EnvError, match="could not be replaced in 3 attempts: no memory"):
        env.reset(0, Episode(0, 0, 0, 1, 0))


@pytest.mark.parametrize("slots", [1, 3])
def test_simulators_are_recycled_between_episodes_and_nothing_else_changes(slots):
    undisturbed = play(1, 1)
    played, _, events, made = run(set(), 1, slots, limits=Limits(recycle_episodes=10))
    assert 4 <= len(events) <= 6 and {e["kind"] for e in events} == {"env_recycled"}
    assert len(made) == len(events) + 1
    assert sorted(played) == list(range(60))
    for index, trajectory in undisturbed.items():
        np.testing.assert_array_equal(trajectory.samples["rewards"], played[index].samples["rewards"])


def test_siblings_of_a_given_up_episode_are_reported_before_anybody_waits_for_more():
    """The step waits for the whole group, so nothing more comes to wake an interaction that waits first."""
    made, reported = [], queue.SimpleQueue()

    def make():
        made.append(Fragile({0}, "reset", num_slots=2, max_steps=10))
        return made[-1]

    interaction = Interaction([SupervisedEnv(make, Limits(), lambda event: None)], prepare, act, seed=3)
    source = EpisodeQueue([Assignment(Episode(i, 0, 0, 100, 7)) for i in range(4)])
    thread = threading.Thread(target=lambda: [reported.put(item) for item in interaction.run(source)], daemon=True)
    thread.start()
    items = [reported.get(timeout=10) for _ in range(4)]
    assert {item.assignment.episode.episode_id for item in items} == {0, 1, 2, 3}
    assert any(isinstance(item, Quarantined) and item.skipped for item in items)
    source.close()
    thread.join(timeout=10)
    interaction.close()
    assert not thread.is_alive()


def test_a_simulator_that_holds_too_much_memory_is_replaced_between_episodes():
    """A real process stands for the simulator's; its size is read where the limit is set, and only after an episode."""
    events, made = [], []
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # just started it holds next to nothing

        def make():
            made.append(Fragile(num_slots=1, max_steps=4))
            made[-1].process = process
            return made[-1]

        interaction = Interaction([SupervisedEnv(make, Limits(recycle_mb=0.5), events.append)], prepare, act, seed=3)
        plan = [Assignment(Episode(i, i % 2, 0, 100 + i, i)) for i in range(3)]
        played = list(interaction.run(EpisodeQueue(plan, closed=True)))
        interaction.close()
        process.kill()
    assert len(played) == 3
    assert [event["kind"] for event in events] == ["env_recycled"] * len(events)
    assert len(made) == len(events) + 1 > 1
    assert "vla3.env.recycle_mb = 0.5" in events[0]["why"]
