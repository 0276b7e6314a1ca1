"""The interaction loop: environments and policy in lock step.

Per round every free slot gets its next episode, all running slots are answered by one policy batch, and all simulators
execute their chunks at the same time. Noise is keyed by episode and chunk, so neither the number of slots nor the order
in which episodes end changes what an episode samples.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vla3_plugin.contract import ChunkResult, Episode, Observation, Trajectory
from vla3_plugin.envs.base import ChunkEnv
from vla3_plugin.policies.base import NoiseKey

Arrays = dict[str, np.ndarray]
Mode = Literal["train", "eval"]
Prepare = Callable[[Sequence[Observation]], Arrays]
# (inputs, noise keys, mode) -> actions [B, C, A], logprob [B, C, D], value [B, 1 or C], trace.*, version [B]
Act = Callable[[Arrays, Sequence[NoiseKey], Mode], Arrays]


@dataclass
class _Running:
    episode: Episode
    observation: Observation
    chunks: list[Arrays] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    success: bool = False


class LockstepInteraction:
    """Runs assigned episodes over ``envs``; one thread an environment process, so that they step at the same time."""

    def __init__(self, envs: Sequence[ChunkEnv], prepare: Prepare, act: Act, seed: int) -> None:
        self.envs, self.prepare, self.act, self.seed = envs, prepare, act, seed
        self.slots = [(e, s) for s in range(max(env.num_slots for env in envs)) for e in range(len(envs))]
        self.slots = [(e, s) for e, s in self.slots if s < envs[e].num_slots]
        self.threads = ThreadPoolExecutor(max_workers=len(envs), thread_name_prefix="env")

    def run(
        self, episodes: Iterable[Episode], mode: Mode, record: frozenset[int] = frozenset()
    ) -> Iterable[Trajectory]:
        """Yield trajectories as they finish. ``record``: ids of episodes whose images are kept for a video."""
        waiting = deque(episodes)
        running: dict[tuple[int, int], _Running] = {}
        truncated: list[tuple[_Running, Observation]] = []
        while waiting or running or truncated:
            self._start(waiting, running, record)
            order = [slot for slot in self.slots if slot in running]
            rows = [running[slot] for slot in order]
            inputs = self.prepare([r.observation for r in rows] + [o for _, o in truncated])
            keys = [(self.seed, r.episode.episode_id, len(r.chunks)) for r in rows + [r for r, _ in truncated]]
            output = self.act(inputs, keys, mode)
            for offset, (run, _) in enumerate(truncated, start=len(rows)):
                run.chunks[-1]["bootstrap"] = output["value"][offset].copy()
                yield _finish(run)
            truncated = []
            results = self._step(order, rows, output["actions"][: len(rows)], record)
            for i, (slot, run) in enumerate(zip(order, rows, strict=True)):
                result = results[slot]
                run.chunks.append(_sample(inputs, output, i, result))
                run.observation, run.success = result.observation, run.success or result.success
                if result.frames is not None:
                    run.frames.extend(result.frames)
                if not result.done:
                    continue
                del running[slot]
                if mode == "train" and result.truncated.any():
                    assert result.final_observation is not None
                    truncated.append((run, result.final_observation))
                else:
                    yield _finish(run)

    def _start(self, waiting: deque[Episode], running: dict[Any, _Running], record: frozenset[int]) -> None:
        starts: dict[int, list[tuple[int, Episode]]] = {}
        for env, slot in self.slots:
            if (env, slot) not in running and waiting:
                starts.setdefault(env, []).append((slot, waiting.popleft()))

        def reset(env: int) -> list[tuple[tuple[int, int], _Running]]:
            return [((env, slot), _Running(e, self.envs[env].reset(slot, e))) for slot, e in starts[env]]

        for started in self.threads.map(reset, starts):
            for key, run in started:
                running[key] = run
                if run.episode.episode_id in record:
                    run.frames.append(next(iter(run.observation.images.values())))

    def _step(
        self, order: list[tuple[int, int]], rows: list[_Running], actions: np.ndarray, record: frozenset[int]
    ) -> dict[tuple[int, int], ChunkResult]:
        by_env: dict[int, list[int]] = {}
        for i, (env, _) in enumerate(order):
            by_env.setdefault(env, []).append(i)

        def step(env: int) -> list[tuple[tuple[int, int], ChunkResult]]:
            rows_of = by_env[env]
            wanted = any(rows[i].episode.episode_id in record for i in rows_of)
            results = self.envs[env].chunk_step([order[i][1] for i in rows_of], actions[rows_of], record=wanted)
            return [(order[i], r) for i, r in zip(rows_of, results, strict=True)]

        return dict(pair for pairs in self.threads.map(step, by_env) for pair in pairs)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for env in self.envs:
            env.close()


def _sample(inputs: Arrays, output: Arrays, row: int, result: ChunkResult) -> Arrays:
    sample = {f"in.{name}": value[row] for name, value in inputs.items()}
    sample |= {name: value[row] for name, value in output.items() if name != "actions"}
    sample |= {n: getattr(result, n) for n in ("rewards", "terminated", "truncated", "valid")}
    sample["bootstrap"] = np.zeros_like(output["value"][row])
    return sample


def _finish(run: _Running) -> Trajectory:
    samples = {name: np.stack([chunk[name] for chunk in run.chunks]) for name in run.chunks[0]}
    return Trajectory(run.episode, samples, run.success, run.frames)
