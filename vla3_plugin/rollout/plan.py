"""The episode plan: which episode comes next, as a pure function of its index.

Episodes are assigned, not drawn inside workers, so a set of episodes is the same whatever the number of workers,
nothing is skipped or repeated, and a cursor (one integer) is all that resuming needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla3_plugin.contract import EnvSpec, Episode

EVAL_OFFSET = 1 << 40  # evaluation episode ids and seeds never meet training's


def _rng(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([k & 0xFFFFFFFF for k in key])))


@dataclass(frozen=True)
class EpisodePlan:
    """Training episodes in groups of ``group_size`` that share task and initial state.

    Groups walk through all (task, initial state) pairs in a seeded order, reshuffled at every pass. Where an
    environment draws its initial state from the seed (``init_states`` empty), a group shares the seed instead.
    """

    seed: int
    tasks: Sequence[int]
    init_states: Sequence[int]
    group_size: int = 1

    def episode(self, index: int) -> Episode:
        group = index // self.group_size
        task, init_state = self._pair(group)
        env_seed = int(_rng(self.seed, 1, group).integers(1 << 31))
        return Episode(index, task, init_state, env_seed, group)

    def episodes(self, start: int, count: int) -> list[Episode]:
        return [self.episode(i) for i in range(start, start + count)]

    def _pair(self, group: int) -> tuple[int, int]:
        states = max(1, len(self.init_states))
        total = len(self.tasks) * states
        order = _rng(self.seed, 2, group // total).permutation(total)
        task, state = divmod(int(order[group % total]), states)
        return self.tasks[task], self.init_states[state] if self.init_states else 0


def evaluation_episodes(tasks: Sequence[int], init_states: Sequence[int], per_task: int, seed: int) -> list[Episode]:
    """``per_task`` assigned episodes of every task: initial states in order, then again with other seeds."""
    episodes = []
    for position, task in enumerate(tasks):
        for k in range(per_task):
            index = EVAL_OFFSET + position * per_task + k
            state = init_states[k % len(init_states)] if init_states else 0
            env_seed = (1 << 31) + int(_rng(seed, 3, task, k).integers(1 << 30))
            episodes.append(Episode(index, task, state, env_seed, index))
    return episodes


def split_init_states(spec: EnvSpec, held_out: int) -> tuple[list[int], list[int]]:
    """(training, evaluation) initial states; ``held_out`` of them, the last ones, are never trained on.

    ``held_out = 0`` is the published protocol of LIBERO, which evaluates on the initial states it trains on.
    """
    states = list(range(spec.num_init_states))
    if not 0 <= held_out < max(1, len(states)):
        raise ValueError(
            f"vla3.env.held_out_init_states is {held_out}, expected 0 to {max(0, len(states) - 1)}: "
            f"{spec.name} has {len(states)} initial states a task"
        )
    return (states[:-held_out], states[-held_out:]) if held_out else (states, states)
