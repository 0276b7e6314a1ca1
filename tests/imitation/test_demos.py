"""Demonstrations: aligned with the policy's chunks, the same whoever makes them, successes only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

TOYS = str(Path(__file__).parents[1] / "envs")
sys.path.insert(0, TOYS)

import toy_env  # noqa: E402

from vla3_plugin.contract import Episode  # noqa: E402
from vla3_plugin.envs.base import ActionNoise  # noqa: E402
from vla3_plugin.imitation import demos  # noqa: E402
from vla3_plugin.imitation.demos import DemoConfig  # noqa: E402


def collected(config: DemoConfig, count: int = 6, **options) -> list[demos.Demonstration]:
    env = toy_env.ToyExpert(num_slots=2, **options)
    episodes = iter(planned(config, env.spec, count))
    found = list(demos.collect(env, lambda: next(episodes, None), config))
    return sorted(found, key=lambda d: d.episode.episode_id)


def planned(config: DemoConfig, spec, count: int) -> list[Episode]:
    dealer = demos.Dealer(config, spec)
    return [dealer.episode(i % len(dealer.tasks), i // len(dealer.tasks)) for i in range(count)]


def make(out: Path, config: DemoConfig, monkeypatch, **settings) -> dict:
    monkeypatch.setenv("PYTHONPATH", TOYS)
    options = settings.pop("options", {})
    return demos.generate("toy", options, out, config, expert="toy_env:ToyExpert", report=lambda _: None, **settings)


def load(out: Path) -> dict[str, np.ndarray]:
    parts = [dict(np.load(file, allow_pickle=False)) for file in sorted(out.glob("*.npz"))]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(whole["episode"], kind="stable")
    return {name: array[order] for name, array in whole.items()}


@pytest.mark.parametrize("stride", [None, 3, 1])
def test_a_sample_holds_the_observation_and_the_actions_that_follow_it(stride):
    config = DemoConfig(chunk=4, stride=stride)
    for demo in collected(config):
        arrays = demos.samples(demo, config.chunk)
        # the noise-free expert's actions, replayed open loop from the reset, pass through every stored observation
        env = toy_env.ToyEnv()
        observation = env.reset(0, demo.episode)
        step, every = 0, stride or config.chunk
        script = np.concatenate(demo.actions)
        for i in range(len(arrays["state"])):
            np.testing.assert_array_equal(arrays["state"][i], observation.state)
            np.testing.assert_array_equal(arrays["images.top"][i], observation.images["top"])
            following = script[step : step + config.chunk]
            np.testing.assert_array_equal(arrays["actions"][i][: len(following)], following)
            assert arrays["action_mask"][i].tolist() == [k < len(following) for k in range(config.chunk)]
            assert not arrays["actions"][i][len(following) :].any()
            result = env.chunk_step([0], script[None, step : step + every])[0]
            observation, step = result.observation, step + every
        assert result.terminated.any() and result.success


def test_with_noise_the_state_is_disturbed_and_the_label_is_not():
    quiet, noisy = DemoConfig(clean=0.0), DemoConfig(noise=0.5, clean=0.0)
    for still, moved in zip(collected(quiet), collected(noisy), strict=True):
        first = np.concatenate(still.actions)[0]
        np.testing.assert_array_equal(np.concatenate(moved.actions)[0], first)
        following = min(len(still.observations), len(moved.observations))
        assert following < 2 or not np.array_equal(still.observations[1].state, moved.observations[1].state)
        assert np.abs(np.concatenate(moved.actions)).max() <= 1.0


def test_the_share_of_clean_episodes_is_as_asked():
    config = DemoConfig(noise=0.3, clean=0.25)
    spec = toy_env.ToyEnv().spec
    noise = [demos.noise_of(config, episode) for episode in planned(config, spec, 400)]
    assert set(noise) == {0.0, 0.3} and 70 <= noise.count(0.0) <= 130


def test_noise_is_the_episodes_own_keeps_bounds_and_spares_the_gripper():
    spec = toy_env.ToyEnv().spec
    action = np.array([0.0, 0.9, 1.0], np.float32)
    runs = [np.stack([noise(action) for _ in range(4000)]) for noise in (ActionNoise(spec, 3, 0.2) for _ in range(2))]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert abs(runs[0][:, 0].std() - 0.2) < 0.02  # half the range is 1
    assert runs[0][:, 1].max() == 1.0 and (runs[0][:, 2] == 1.0).all()
    drift = runs[0][:, 0]
    assert 0.7 < np.corrcoef(drift[:-1], drift[1:])[0, 1] < 0.9


def test_episodes_walk_through_initial_states_and_spare_the_held_out_ones():
    spec = toy_env.ToyEnv(init_states=5).spec
    episodes = planned(DemoConfig(held_out_init_states=2), spec, 12)
    assert [(e.task_id, e.init_state_id) for e in episodes] == [(i % 2, i // 2 % 3) for i in range(12)]
    assert len({e.seed for e in episodes}) == 12 and [e.episode_id for e in episodes] == list(range(12))
    assert {e.task_id for e in planned(DemoConfig(tasks=(1,)), spec, 4)} == {1}


def test_a_worker_stays_with_its_task_and_every_task_gets_its_share():
    dealer = demos.Dealer(DemoConfig(episodes=5, give_up=0.0), toy_env.ToyEnv().spec)
    dealt: dict[int, list[Episode]] = {0: [], 1: []}
    random = np.random.default_rng(0)
    waiting: dict[int, Episode | None] = {w: dealer.next(w) for w in dealt}
    while any(waiting.values()):
        worker = int(random.choice([w for w, e in waiting.items() if e]))
        episode = waiting[worker]
        assert episode is not None
        dealt[worker].append(episode)
        dealer.done(demos.Demonstration(episode, [], success=bool(random.random() < 0.6)))
        waiting[worker] = dealer.next(worker)
    assert dealer.counts()[0] == 5 and dealer._kept == [3, 2]
    switches = sum(a.task_id != b.task_id for d in dealt.values() for a, b in zip(d, d[1:], strict=False))
    assert dealt[0][0].task_id != dealt[1][0].task_id and switches <= 1


def test_two_workers_make_what_one_makes(tmp_path, monkeypatch):
    config = DemoConfig(episodes=7, chunk=4, stride=2, noise=0.2)
    skill = {"skill": 0.7}  # failures too must not depend on who runs what
    alone = make(tmp_path / "one", config, monkeypatch, options=skill)
    both = make(tmp_path / "two", config, monkeypatch, options=skill, workers=2, slots_per_process=2)
    assert list((tmp_path / "two").glob("*.npz"))  # two files, or one where a worker starts when all is done
    for count in ("episodes", "tried", "samples", "control_steps"):
        assert alone[count] == both[count]
    assert both["episodes"] == 7 < both["tried"]
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_only_successes_are_kept_and_the_card_counts_the_rest(tmp_path, monkeypatch):
    config = DemoConfig(episodes=10, chunk=4)
    card = make(tmp_path, config, monkeypatch, options={"skill": 0.6})
    assert card == json.loads((tmp_path / "card.json").read_text())
    data = load(tmp_path)
    assert card["episodes"] == len(np.unique(data["episode"])) == 10
    assert card["tried"] > 10 and card["success_rate"] == 10 / card["tried"]
    assert card["samples"] == len(data["state"])
    assert data["images.top"].dtype == np.uint8 and data["images.top"].shape[1:] == (64, 64, 3)
    assert data["instruction"][0] == f"press on the {['red', 'blue'][data['task'][0]]} dot"
    assert (data["actions"][..., 2] > 0).any()  # the press that ends each episode
    last = [np.flatnonzero(data["episode"] == e)[-1] for e in np.unique(data["episode"])]
    for i in last:
        assert data["actions"][i][data["action_mask"][i]][-1, 2] > 0


def test_an_expert_that_does_not_fit_is_given_up(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"of 2\d episodes of task \d .*succeeded: the expert does not fit"):
        make(tmp_path, DemoConfig(episodes=30, give_up=0.5), monkeypatch, options={"skill": 0.1})
    assert not list(tmp_path.glob("*.npz"))


def test_old_demonstrations_are_not_mixed_with_new_ones(tmp_path, monkeypatch):
    make(tmp_path, DemoConfig(episodes=1), monkeypatch)
    with pytest.raises(FileExistsError, match="already holds 1 demonstration"):
        make(tmp_path, DemoConfig(episodes=1), monkeypatch)


def test_an_environment_without_an_expert_is_named(tmp_path):
    with pytest.raises(ValueError, match="no scripted expert for 'toy'.*libero.*maniskill"):
        demos.generate("toy", {}, tmp_path, DemoConfig())


@pytest.mark.parametrize("bad", [{"episodes": 0}, {"stride": 9}, {"noise": -0.1}, {"clean": 2}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        DemoConfig(**bad)


def test_seeds_stay_apart_from_those_of_training_and_evaluation():
    from vla3_plugin.rollout.plan import EpisodePlan, evaluation_episodes

    spec = toy_env.ToyEnv().spec
    ours = {episode.seed for episode in planned(DemoConfig(), spec, 2000)}
    train = {e.seed for e in EpisodePlan(0, [0, 1], []).episodes(0, 2000)}
    held_out = {e.seed for e in evaluation_episodes([0, 1], [], 1000, 0)}
    assert not ours & train and not ours & held_out
