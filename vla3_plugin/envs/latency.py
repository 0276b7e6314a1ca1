"""A simulator that takes time and no processor: chunk steps and resets sleep for durations drawn per episode.

It stands where a real one would, in a child interpreter behind ``EnvProcess``, so that queues, threads, processes and
weights are the real ones and a machine of two cores shows what a cluster would do. Every duration belongs to its
episode and chunk index: an episode takes the same time under every schedule, and schedules can be compared in pairs.

The task is easy on purpose: act like the goal that the state shows. Durations, lengths and success depend on nothing
the policy does, so that a schedule under which it learns faster does not get other work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions
from vla3_plugin.envs.latency_draw import parse_duration, uniform

_CHUNK, _RESET, _LENGTH, _LUCK, _LOOK = range(5)  # streams of random numbers, so that one tells nothing of another
_SPEED = 0.05  # of an action of 1, per control step
_INSTRUCTION = "act like the goal"


@dataclass
class _Slot:
    episode: Episode
    length: int  # control steps after which the episode ends by itself, if it succeeds
    lucky: bool
    goal: np.ndarray  # float32 [A]
    noise: np.ndarray  # float32 [S - 2A - 1]
    picture: np.ndarray  # uint8 [H, W, 3]
    hand: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # float32 [A]
    steps: int = 0
    chunks: int = 0
    ended: bool = False

    def key(self, stream: int, *more: int) -> tuple[int, ...]:
        """Members of a group share the seed; the episode's id keeps their durations apart."""
        return (self.episode.seed, self.episode.episode_id, stream, *more)


class LatencyEnv:
    """``ChunkEnv`` whose chunk steps take a drawn time.

    Args:
        num_slots: environments of this shard.
        chunk_ms: distribution of a chunk step's duration, see ``latency_draw``.
        per: ``env``: every slot draws its own, and the shard takes the longest (a vector of CPU simulators); ``shard``:
            one draw for the shard, and ``chunk_ms_per_env`` for each slot in it (a GPU simulator).
        chunk_ms_per_env: see ``per``; ms.
        reset_ms: distribution of a reset's duration.
        chunk: control steps of a chunk step; what episodes are measured in.
        episode_chunks: an episode's length: a number of chunk steps, at which every episode is truncated; or ``{low,
            high}``: successful episodes end by themselves after a number drawn evenly from it, others are truncated at
            ``high``.
        success: probability that an episode succeeds.
        action_reward: return, at most, for acting like the goal throughout; success adds 1.
        tasks: number of tasks.
        image_size: height and width of each camera's images.
        cameras, state_dim, action_dim: shapes of observations and actions.

    Raises:
        ValueError: an option out of range; the message names it.
    """

    def __init__(
        self,
        num_slots: int = 1,
        chunk_ms: Union[float, Mapping[str, Any]] = 100.0,
        per: str = "env",
        chunk_ms_per_env: float = 0.0,
        reset_ms: Union[float, Mapping[str, Any]] = 0.0,
        chunk: int = 8,
        episode_chunks: Union[int, Mapping[str, int]] = 20,
        success: float = 0.5,
        action_reward: float = 0.5,
        tasks: int = 1,
        image_size: int = 64,
        cameras: int = 1,
        state_dim: int = 42,
        action_dim: int = 7,
    ) -> None:
        where = "vla3.env.options"
        for name, value, low in (
            ("chunk", chunk, 1), ("tasks", tasks, 1), ("image_size", image_size, 2), ("cameras", cameras, 1),
            ("action_dim", action_dim, 1), ("state_dim", state_dim, 2 * action_dim + 1),
        ):  # fmt: skip
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{where}.{name}: {value!r}, expected a whole number, at least {low}")
        if per not in ("env", "shard"):
            raise ValueError(f"{where}.per: {per!r}, expected env or shard")
        if chunk_ms_per_env < 0 or (chunk_ms_per_env > 0 and per == "env"):
            raise ValueError(
                f"{where}.chunk_ms_per_env: {chunk_ms_per_env}, expected at least 0, and 0 where per is env"
            )
        if not 0 <= success <= 1:
            raise ValueError(f"{where}.success: {success}, expected a probability, 0 to 1")
        self._chunk_ms = parse_duration(chunk_ms, f"{where}.chunk_ms")
        self._reset_ms = parse_duration(reset_ms, f"{where}.reset_ms")
        self._per, self._per_env_ms = per, float(chunk_ms_per_env)
        self._low, self._high = episode_length(episode_chunks, f"{where}.episode_chunks")
        self._fixed = isinstance(episode_chunks, int)
        self._chunk, self._success, self._action_reward = chunk, float(success), float(action_reward)
        self.num_slots = num_slots
        names = [f"a{i}" for i in range(action_dim)]
        self.spec = EnvSpec(
            name="latency",
            cameras={f"camera{i}": (image_size, image_size) for i in range(cameras)},
            state_names=[f"goal_{n}" for n in names]
            + [f"hand_{n}" for n in names]
            + ["time"]
            + [f"noise{i}" for i in range(state_dim - 2 * action_dim - 1)],
            action_names=names,
            action_low=[-1.0] * action_dim,
            action_high=[1.0] * action_dim,
            max_steps=self._high * chunk,
            control_hz=20.0,
            success="drawn with the episode; the policy has no part in it",
            num_tasks=tasks,
            num_init_states=0,
            instructions=[_INSTRUCTION if i == 0 else f"{_INSTRUCTION}, kind {i}" for i in range(tasks)],
        )
        self._slots: list[Optional[_Slot]] = [None] * num_slots

    def reset(self, slot: int, episode: Episode) -> Observation:
        start = time.perf_counter()
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}, expected 0 to {self.num_slots - 1}")
        if not 0 <= episode.task_id < self.spec.num_tasks or episode.init_state_id != 0:
            raise ValueError(
                f"task {episode.task_id}, initial state {episode.init_state_id}: expected 0 to "
                f"{self.spec.num_tasks - 1}, and 0: initial states are drawn from the seed"
            )
        look = np.random.default_rng([episode.seed & 0xFFFFFFFFFFFFFFFF, episode.task_id, _LOOK])
        dim = self.spec.action_dim
        size = next(iter(self.spec.cameras.values()))[0]
        now = _Slot(
            episode,
            length=self.spec.max_steps,
            lucky=False,
            goal=look.uniform(-1, 1, dim).astype(np.float32),
            noise=look.uniform(-1, 1, self.spec.state_dim - 2 * dim - 1).astype(np.float32),
            picture=look.integers(0, 256, (size, size, 3), dtype=np.uint8),
            hand=np.zeros(dim, np.float32),
        )
        now.lucky = uniform(*now.key(_LUCK)) < self._success
        if now.lucky and not self._fixed:
            span = self._high - self._low + 1
            now.length = self._chunk * (self._low + int(uniform(*now.key(_LENGTH)) * span))
        self._slots[slot] = now
        _sleep_until(start, self._reset_ms.draw(*now.key(_RESET)))
        return self._observe(now)

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        start = time.perf_counter()
        check_actions(actions, self.spec, "latency")
        if len(actions) != len(slots):
            raise ValueError(f"{len(actions)} action chunks for {len(slots)} slots")
        rows = [self._running(slot) for slot in slots]
        duration = self._duration(rows)
        results = [self._run(now, actions[i], record) for i, now in enumerate(rows)]
        _sleep_until(start, duration)
        return results

    def close(self) -> None:
        """There is nothing to end."""

    def _running(self, slot: int) -> _Slot:
        now = self._slots[slot]
        if now is None or now.ended:
            raise RuntimeError(f"slot {slot} has no running episode; reset it first")
        return now

    def _duration(self, rows: list[_Slot]) -> float:
        """ms of the next chunk step of ``rows``."""
        if self._per == "env":
            return max(self._chunk_ms.draw(*now.key(_CHUNK, now.chunks)) for now in rows)
        first = min(rows, key=lambda now: now.episode.episode_id)  # whatever the order of slots
        return self._chunk_ms.draw(*first.key(_CHUNK, first.chunks)) + self._per_env_ms * len(rows)

    def _run(self, now: _Slot, actions: np.ndarray, record: bool) -> ChunkResult:
        """The physics of a chunk, without its duration."""
        length = len(actions)
        count = min(length, now.length - now.steps)
        executed = np.clip(actions[:count], -1.0, 1.0)
        rewards = np.zeros(length, np.float32)
        rewards[:count] = self._action_reward * (1.0 - np.square(executed - now.goal).mean(1)) / self.spec.max_steps
        terminated, truncated, valid = (np.zeros(length, np.bool_) for _ in range(3))
        valid[:count] = True
        now.hand = np.clip(now.hand + _SPEED * executed.sum(0), -1.0, 1.0).astype(np.float32)
        now.steps += count
        now.chunks += 1
        now.ended = now.steps >= now.length
        success = now.ended and now.lucky
        if now.ended:
            by_itself = success and not self._fixed
            (terminated if by_itself else truncated)[count - 1] = True
            rewards[count - 1] += float(success)
        observation = self._observe(now)
        return ChunkResult(
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            success=success,
            observation=observation,
            final_observation=observation if now.ended else None,
            frames=np.repeat(next(iter(observation.images.values()))[None], count, axis=0) if record else None,
        )

    def _observe(self, now: _Slot) -> Observation:
        """The episode's picture, shifted by a pixel from camera to camera, with a bar that shows how far it is."""
        size = len(now.picture)
        images = {}
        for i, camera in enumerate(self.spec.cameras):
            image = now.picture.copy()
            image[0] = 0
            image[0, : 1 + (size - 1) * now.steps // self.spec.max_steps] = 255
            images[camera] = np.roll(image, i, axis=1)
        progress = np.array([now.steps / self.spec.max_steps], np.float32)
        return Observation(
            images,
            np.concatenate([now.goal, now.hand, progress, now.noise]),
            self.spec.instructions[now.episode.task_id],
        )


def episode_length(value: Union[int, Mapping[str, int]], key: str) -> tuple[int, int]:
    """(shortest, longest) length of a successful episode in chunk steps.

    Raises:
        ValueError: neither a whole number nor ``{low, high}`` with 1 <= low <= high.
    """
    low, high = value, value
    if isinstance(value, Mapping):
        low, high = value.get("low"), value.get("high")  # type: ignore[assignment]
        if set(value) != {"low", "high"}:
            low = None  # type: ignore[assignment]
    if isinstance(low, int) and isinstance(high, int) and 1 <= low <= high:
        return low, high
    raise ValueError(f"{key}: {value!r}, expected a number of chunk steps, or {{low, high}} with 1 <= low <= high")


def _sleep_until(start: float, duration_ms: float) -> None:
    """Let ``duration_ms`` have passed since ``start``: what was computed meanwhile counts."""
    left = start + duration_ms / 1000 - time.perf_counter()
    if left > 0:
        time.sleep(left)
