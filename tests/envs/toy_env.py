"""A small environment for tests: numpy alone, Python 3.9 and newer, a millisecond an episode.

A hand in the plane [-1, 1] x [-1, 1] is to press on one of two dots; task 0 wants the red one, task 1 the blue one.
The image shows both dots and the hand (white), +x right and +y up. Only the hand's position is in the state, so a
policy has to look. ``tests/envs`` must be on the path: ``EnvProcess("toy_env:ToyEnv", paths=[".../tests/envs"])``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions
from vla3_plugin.envs.base import ActionNoise, ExpertChunk

SPEED = 0.15  # of an action of 1, per control step
NEAR = 0.12
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


class ToyEnv:
    """``init_states``: 0 draws initial states from the seed; otherwise the episode's ``init_state_id`` picks one."""

    def __init__(
        self,
        num_slots: int = 1,
        max_steps: int = 24,
        size: int = 64,
        init_states: int = 0,
        ignore_terminations: bool = False,
    ) -> None:
        self.num_slots, self._size = num_slots, size
        self._ignore_terminations = ignore_terminations
        self.spec = EnvSpec(
            name="toy",
            cameras={"top": (size, size)},
            state_names=["x", "y"],
            action_names=["dx", "dy", "press"],
            action_low=[-1.0, -1.0, -1.0],
            action_high=[1.0, 1.0, 1.0],
            max_steps=max_steps,
            control_hz=10.0,
            success="the hand pressed on the dot of the task",
            num_tasks=len(COLOURS),
            num_init_states=init_states,
            instructions=[f"press on the {name} dot" for name in COLOURS],
        )
        self._slots: list[_Slot | None] = [None] * num_slots

    def reset(self, slot: int, episode: Episode) -> Observation:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}")
        states = max(1, self.spec.num_init_states)
        if not (0 <= episode.task_id < len(COLOURS) and 0 <= episode.init_state_id < states):
            raise ValueError(f"task {episode.task_id}, initial state {episode.init_state_id}")
        key = [episode.init_state_id] if self.spec.num_init_states else [1, episode.seed]
        self._slots[slot] = _Slot(episode, np.random.default_rng(key))
        return self._observe(slot)

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        check_actions(actions, self.spec, "toy")
        if len(actions) != len(slots):
            raise ValueError(f"{len(actions)} action chunks for {len(slots)} slots")
        return [self._run(slot, actions[i], record) for i, slot in enumerate(slots)]

    def close(self) -> None:
        pass

    def _run(self, slot: int, actions: np.ndarray, record: bool) -> ChunkResult:
        now = self._slots[slot]
        if now is None or now.ended:
            raise RuntimeError(f"slot {slot} has no running episode")
        length = len(actions)
        rewards = np.zeros(length, np.float32)
        terminated, truncated, valid = (np.zeros(length, np.bool_) for _ in range(3))
        frames = []
        for i in range(length):
            now.hand = np.clip(now.hand + SPEED * np.clip(actions[i, :2], -1, 1), -1, 1)
            now.steps += 1
            pressed = actions[i, 2] > 0 and np.linalg.norm(now.hand - now.goal) < NEAR
            rewards[i] = float(pressed and not now.success)
            now.success = now.success or bool(pressed)
            valid[i] = True
            terminated[i] = pressed and not self._ignore_terminations
            truncated[i] = now.steps >= self.spec.max_steps and not terminated[i]
            if record:
                frames.append(self._draw(now))
            if terminated[i] or truncated[i]:
                now.ended = True
                break
        observation = self._observe(slot)
        return ChunkResult(
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            success=now.success,
            observation=observation,
            final_observation=observation if now.ended else None,
            frames=np.stack(frames) if record else None,
        )

    def _observe(self, slot: int) -> Observation:
        now = self._slots[slot]
        assert now is not None
        return Observation({"top": self._draw(now)}, now.hand.astype(np.float32), self.spec.instructions[now.task])

    def _draw(self, now: _Slot) -> np.ndarray:
        image = np.full((self._size, self._size, 3), 40, np.uint8)
        rows, columns = np.mgrid[: self._size, : self._size]
        for place, colour in [*zip(now.dots, COLOURS.values()), (now.hand, (255, 255, 255))]:  # noqa: B905
            column, row = (place * [1, -1] + 1) / 2 * (self._size - 1)
            image[(rows - row) ** 2 + (columns - column) ** 2 <= (0.05 * self._size) ** 2] = colour
        return image


class _Slot:
    def __init__(self, episode: Episode, random: np.random.Generator) -> None:
        self.hand = random.uniform(-0.9, 0.9, 2)
        self.dots = random.uniform(-0.9, 0.9, (len(COLOURS), 2))
        self.task, self.seed = episode.task_id, episode.seed
        self.goal = self.dots[self.task]
        self.steps, self.success, self.ended = 0, False, False


class ToyExpert(ToyEnv):
    """``ExpertEnv``: goes to the dot and presses. ``skill``: the share of episodes in which it ever presses."""

    def __init__(self, skill: float = 1.0, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._skill = skill

    def expert_chunk(self, slots: list[int], length: int, noise: float = 0.0) -> list[ExpertChunk]:
        chunks = []
        for slot in slots:
            now = self._slots[slot]
            assert now is not None
            able = np.random.default_rng(now.seed).random() < self._skill
            disturb = ActionNoise(self.spec, now.seed + now.steps, noise)
            wanted, results = np.zeros((length, 3), np.float32), []
            for i in range(length):
                way = (now.goal - now.hand) / SPEED
                wanted[i, :2] = way / max(1.0, np.abs(way).max())
                wanted[i, 2] = 1.0 if able and np.linalg.norm(now.hand - now.goal) < NEAR else -1.0
                results.append(self._run(slot, disturb(wanted[i])[None], record=False))
                if now.ended:
                    break
            flags = {}
            for name in ("rewards", "terminated", "truncated", "valid"):
                parts = [getattr(r, name) for r in results]
                flags[name] = np.concatenate([*parts, np.zeros(length - len(results), parts[0].dtype)])
            last = results[-1]
            whole = ChunkResult(
                success=last.success, observation=last.observation, final_observation=last.final_observation, **flags
            )
            chunks.append(ExpertChunk(wanted, whole))
        return chunks


class FaultyEnv(ToyEnv):
    """A toy that fails in its ``at``-th chunk step (-1: when it is made), in one of the ways real simulators do."""

    def __init__(self, fault: str = "none", at: int = 0, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._fault, self._at, self._calls = fault, at, 0
        print("the simulator says hello")
        if at < 0:
            self._fail()

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        self._calls += 1
        results = super().chunk_step(slots, actions, record)
        if self._calls - 1 == self._at:
            self._fail()
            if self._fault == "nan state":
                results[0].observation.state[1] = np.nan
            if self._fault == "image shape":
                results[0].observation.images["top"] = results[0].observation.images["top"][:, :, :1]
            if self._fault == "image type":
                results[0].observation.images["top"] = results[0].observation.images["top"] / np.float32(255)
            if self._fault == "late reward":
                results[0].rewards[~results[0].valid] = 1.0
        return results

    def _fail(self) -> None:
        if self._fault == "exit":
            print("about to leave", file=sys.stderr, flush=True)
            os._exit(7)
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "hang":
            time.sleep(3600)
        if self._fault == "raise":
            raise RuntimeError("the physics diverged")
        if self._fault == "sys.exit":
            sys.exit("giving up")
        if self._fault == "ask":
            input("download it? ")
        if self._fault == "chatter":
            print("x" * (1 << 20), flush=True)
            self._at += 1


class BareEnv(ToyEnv):
    """Says in its name what the interpreter it runs in has."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        found = {name: importlib.util.find_spec(name) is not None for name in ("torch", "ray", "verl")}
        about = {"python": list(sys.version_info[:2]), "prefix": sys.prefix, "numpy": np.__version__, **found}
        self.spec.name = json.dumps(about)


class UnseededEnv(ToyEnv):
    """Breaks a promise: its initial states do not depend on the seed alone."""

    def reset(self, slot: int, episode: Episode) -> Observation:
        super().reset(slot, episode)
        now = self._slots[slot]
        assert now is not None
        now.hand = np.random.default_rng().uniform(-0.9, 0.9, 2)
        return self._observe(slot)


class DeafEnv(ToyEnv):
    """Breaks a promise: actions have no effect."""

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        check_actions(actions, self.spec, "toy")
        return super().chunk_step(slots, np.zeros_like(actions), record)


class EndlessEnv(ToyEnv):
    """Breaks a promise: an episode that ended can be stepped on."""

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        for slot in slots:
            now = self._slots[slot]
            if now is not None and now.ended:
                now.ended, now.steps = False, 0
        return super().chunk_step(slots, actions, record)


class BlindEnv(ToyEnv):
    """Breaks a promise: its images are black."""

    def _draw(self, now: _Slot) -> np.ndarray:
        return np.zeros((self._size, self._size, 3), np.uint8)


class OverrunEnv(ToyEnv):
    """Breaks a promise: truncation comes one step after ``max_steps``."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.spec.max_steps -= 1

    def _run(self, slot: int, actions: np.ndarray, record: bool) -> ChunkResult:
        self.spec.max_steps += 1
        try:
            return super()._run(slot, actions, record)
        finally:
            self.spec.max_steps -= 1
