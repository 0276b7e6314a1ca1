"""Episodes of the toy environment, played in process by the interaction loop, for tests to compare."""

import numpy as np
from toy_env import ToyEnv

from vla3_plugin.contract import Episode
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue
from vla3_plugin.rollout.interaction import Interaction


def prepare(observations):
    return {"state": np.stack([o.state for o in observations])}


def act(inputs, keys, mode):
    """Noise from the key alone; the value says which observation was asked about."""
    noise = [np.random.default_rng([k & 0xFFFF for k in key]).uniform(-1, 1, (4, 3)) for key in keys]
    count = len(keys)
    return {
        "actions": np.array(noise, np.float32),
        "logprob": np.zeros((count, 4, 3), np.float32),
        "value": inputs["state"].sum(1, keepdims=True),
        "version": np.zeros(count, np.int64),
    }


def play(env_count, slots, episodes=60, mode="train", always=False, **options):
    envs = [ToyEnv(num_slots=slots, max_steps=10, **options) for _ in range(env_count)]
    interaction = Interaction(envs, prepare, act, seed=3, bootstrap_terminated=always)
    plan = [Episode(i, i % 2, 0, 100 + i, i) for i in range(episodes)]
    try:
        source = EpisodeQueue([Assignment(e, mode, True, e.episode_id == 2) for e in plan], closed=True)
        return {t.episode.episode_id: t for _, t in interaction.run(source)}
    finally:
        interaction.close()
