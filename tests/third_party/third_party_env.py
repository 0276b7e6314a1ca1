"""Somebody else's simulator: a hand on a line is to reach the right-hand end. numpy alone."""

from __future__ import annotations

import os
import time

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation


class ToyEnv:
    """``bad``: what happens in the first chunk of an episode, by its id: ``exit`` (as a crash in native code does),
    ``raise``, ``hang``, ``bad_state`` or ``bad_reward`` (not finite). ``delay_s``: of every chunk.
    """

    def __init__(
        self,
        num_slots: int = 1,
        max_steps: int = 16,
        init_states: int = 4,
        bad: dict[str, str] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.num_slots, self._bad, self._delay_s = num_slots, bad or {}, delay_s
        self._episode = [-1] * num_slots
        self.spec = EnvSpec(
            name="line",
            cameras={"front": (8, 8)},
            state_names=["x", "time"],
            action_names=["dx"],
            action_low=[-1.0],
            action_high=[1.0],
            max_steps=max_steps,
            control_hz=10.0,
            success="x above 0.5",
            num_tasks=1,
            num_init_states=init_states,
            instructions=["go right"],
        )
        self._x = [0.0] * num_slots
        self._steps = [0] * num_slots

    def reset(self, slot: int, episode: Episode) -> Observation:
        self._x[slot], self._steps[slot] = -0.1 * episode.init_state_id, 0
        self._episode[slot] = episode.episode_id
        return self._observe(slot)

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        time.sleep(self._delay_s)
        return [self._suffer(slot, self._run(slot, actions[i], record)) for i, slot in enumerate(slots)]

    def close(self) -> None:
        pass

    def _suffer(self, slot: int, result: ChunkResult) -> ChunkResult:
        how = self._bad.get(str(self._episode[slot]))
        if how == "exit":
            os._exit(139)
        if how == "raise":
            raise RuntimeError("the physics exploded")
        if how == "hang":
            time.sleep(3600)
        if how == "bad_state":
            result.observation.state[0] = np.nan
        if how == "bad_reward":
            result.rewards[0] = np.nan
        return result

    def _run(self, slot: int, actions: np.ndarray, record: bool) -> ChunkResult:
        length = len(actions)
        rewards = np.zeros(length, np.float32)
        terminated, truncated, valid = (np.zeros(length, np.bool_) for _ in range(3))
        frames = []
        for i in range(length):
            before = self._x[slot]
            self._x[slot] += 0.2 * float(np.clip(actions[i, 0], -1, 1))
            self._steps[slot] += 1
            valid[i] = True
            terminated[i] = self._x[slot] > 0.5
            rewards[i] = self._x[slot] - before
            truncated[i] = self._steps[slot] >= self.spec.max_steps and not terminated[i]
            frames.append(self._observe(slot).images["front"])
            if terminated[i] or truncated[i]:
                break
        observation = self._observe(slot)
        ended = bool(terminated.any() or truncated.any())
        return ChunkResult(
            rewards, terminated, truncated, valid, bool(terminated.any()), observation,
            observation if ended else None, np.stack(frames) if record else None,
        )  # fmt: skip

    def _observe(self, slot: int) -> Observation:
        image = np.full((8, 8, 3), 30, np.uint8)
        image[4, int(np.clip(4 + 3 * self._x[slot], 0, 7))] = 255
        state = np.array([self._x[slot], self._steps[slot] / self.spec.max_steps], np.float32)
        return Observation({"front": image}, state, "go right")
