"""Scripted experts with privileged state for ManiSkill's PickCube, PushCube and StackCube.

Closed loop: every action is computed from the present poses of hand and objects, so that an expert corrects disturbed
actions and starts over when it loses the object. They speak ``pd_ee_delta_pose``, as a policy does.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from vla3_plugin.contract import Episode, Observation
from vla3_plugin.envs.base import NO_ERROR, ActionNoise, ExpertChunk, check_grasp_error
from vla3_plugin.envs.maniskill import ManiSkillEnv

METRE = 10.0  # action per metre that the controller is asked for (1.0 is 10 cm)
GAIN = 1.2  # asked-for displacement per remaining displacement: makes up for the arm's lag
SPEED = 0.4  # largest action: about 1.6 cm a step, slow enough that a policy sees the cube before it closes
OPEN, CLOSED = 1.0, -1.0
HALF = 0.02  # m, half the edge of the cubes
NEAR = 0.012  # m, close enough to grasp
LOST = 0.05  # m between hand and object: it slipped out of the hand
SLOPE = 3.0  # height kept per metre of horizontal error: the hand comes down in a steep funnel
CLOSE_STEPS, OPEN_STEPS = 4, 4  # control steps that the fingers need


class Hand:
    """Poses that experts read, and actions that they make of displacements. ``sim`` is ManiSkill's environment."""

    def __init__(self, sim: Any, row: int, speed: float = SPEED, error: Sequence[float] = NO_ERROR) -> None:
        self._sim, self._row, self._speed, self._error = sim, row, speed, np.asarray(error, np.float64)

    def tcp(self) -> np.ndarray:
        """float64 [3], m, world."""
        return self.position(self._sim.agent.tcp)

    def position(self, thing: Any) -> np.ndarray:
        return thing.pose.p[self._row].cpu().numpy().astype(np.float64)

    def grasp_point(self, thing: Any) -> np.ndarray:
        """float64 [3]: where it takes ``thing`` to be when it grasps."""
        return self.position(thing) + self._error

    def axis(self, thing: Any, index: int) -> np.ndarray:
        """float64 [3]: column ``index`` of the rotation matrix of ``thing``."""
        return thing.pose.to_transformation_matrix()[self._row, :3, index].cpu().numpy().astype(np.float64)

    def move(self, displacement: np.ndarray, gripper: float, turn: float = 0.0) -> np.ndarray:
        """float32 [7]: go ``displacement`` (m) from here, turn by ``turn`` (rad about the world's z)."""
        step = METRE * GAIN * displacement
        step = step * self._speed / max(self._speed, float(np.abs(step).max()))  # keeps its direction
        yaw = np.clip(-METRE * turn, -1.0, 1.0)  # ManiSkill turns the other way
        return np.array([*step, 0.0, 0.0, yaw, gripper], dtype=np.float32)


class PickCube:
    """Over the cube, down, close, carry to the goal. The fingers turn the cube into their own orientation."""

    def __init__(self, sim: Any, hand: Hand) -> None:
        self._sim, self._hand = sim, hand
        self._closing = 0

    def action(self) -> np.ndarray:
        cube, goal = self._hand.position(self._sim.cube), self._hand.position(self._sim.goal_site)
        offset = self._hand.grasp_point(self._sim.cube) - self._hand.tcp()
        if self._closing and np.linalg.norm(offset) > LOST:
            self._closing = 0
        if self._closing or (np.linalg.norm(offset[:2]) < NEAR and abs(offset[2]) < NEAR):
            self._closing += 1
            displacement = goal - cube if self._closing > CLOSE_STEPS else np.zeros(3)
            return self._hand.move(displacement, CLOSED)
        return self._hand.move(approach(offset), OPEN)


class PushCube:
    """Behind the cube, down, and forward until the cube is in the goal region."""

    BEHIND = 0.05  # m from the cube's centre to where the closed fingers come down
    TOUCH = 0.035  # m from the cube's centre to fingers in contact, about

    def __init__(self, sim: Any, hand: Hand) -> None:
        self._sim, self._hand = sim, hand

    def action(self) -> np.ndarray:
        tcp, cube = self._hand.tcp(), self._hand.position(self._sim.obj)
        goal = self._hand.position(self._sim.goal_region)
        behind = cube - tcp
        if tcp[2] < 2 * HALF and abs(behind[1]) < 0.02 and behind[0] > 0.02:
            push = np.array([goal[0] - cube[0], 1.5 * behind[1], HALF - tcp[2]])
            return self._hand.move(push, CLOSED)
        start = cube - [self.BEHIND, 0, 0] - tcp
        return self._hand.move(approach(start), CLOSED)


class StackCube:
    """Pick up cube A, carry it over cube B, put it down and let go."""

    CLEAR = 0.035  # m between the bottom of what is carried and the top of what it passes over

    def __init__(self, sim: Any, hand: Hand) -> None:
        self._sim, self._hand = sim, hand
        self._closing = self._opening = 0

    def action(self) -> np.ndarray:
        cube = self._hand.position(self._sim.cubeA)
        place = self._hand.position(self._sim.cubeB) + [0, 0, 2 * HALF]
        offset = self._hand.grasp_point(self._sim.cubeA) - self._hand.tcp()
        if self._opening:
            self._opening += 1
            if self._opening > OPEN_STEPS + 8:
                self._opening = self._closing = 0
            up = 0.1 if self._opening > OPEN_STEPS else 0.0
            return self._hand.move(np.array([0, 0, up]), OPEN)
        if self._closing and np.linalg.norm(offset) > LOST:
            self._closing = 0
        if self._closing or (np.linalg.norm(offset[:2]) < NEAR and abs(offset[2]) < NEAR):
            self._closing += 1
            if self._closing <= CLOSE_STEPS:
                return self._hand.move(np.zeros(3), CLOSED)
            way = place - cube
            if np.linalg.norm(way[:2]) < 0.008 and abs(way[2]) < 0.008:
                self._opening = 1
                return self._hand.move(np.zeros(3), OPEN)
            return self._hand.move(self._carry(way), CLOSED)
        return self._hand.move(approach(offset), OPEN, self._turn())

    def _carry(self, way: np.ndarray) -> np.ndarray:
        """Up, across once it is high enough, then down."""
        aside = float(np.linalg.norm(way[:2]))
        up = way[2] + self.CLEAR * min(1.0, max(0.0, aside - 0.006) / 0.02)
        lifted = min(1.0, max(0.0, 1.0 - (way[2] + 0.5 * self.CLEAR) / 0.03)) if aside > 0.03 else 1.0
        return np.array([way[0] * lifted, way[1] * lifted, up])

    def _turn(self) -> float:
        """Angle (rad) to the cube's sides, choosing the pair that keeps the fingers away from cube B."""
        fingers = self._hand.axis(self._sim.agent.tcp, 1)
        side = self._hand.axis(self._sim.cubeA, 0)
        between = self._hand.position(self._sim.cubeB) - self._hand.position(self._sim.cubeA)
        current = np.arctan2(fingers[1], fingers[0])
        turns = [wrap(np.arctan2(side[1], side[0]) + k * np.pi / 2 - current) for k in range(2)]
        if np.linalg.norm(between[:2]) < 0.12:
            across = np.arctan2(between[1], between[0])
            return min(turns, key=lambda t: abs(np.cos(current + t - across)))
        return min(turns, key=abs)


def approach(offset: np.ndarray) -> np.ndarray:
    """Displacement towards a point ``offset`` away, from above."""
    aside = float(np.linalg.norm(offset[:2]))
    return offset + [0.0, 0.0, min(0.1, SLOPE * max(0.0, aside - NEAR))]


def wrap(angle: float) -> float:
    """The equal angle in [-pi/2, pi/2): a gripper has no front."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)


EXPERTS: dict[str, Any] = {"PickCube-v1": PickCube, "PushCube-v1": PushCube, "StackCube-v1": StackCube}


class ManiSkillExpert(ManiSkillEnv):
    """``ExpertEnv``: a ``ManiSkillEnv`` that drives itself on the tasks of ``EXPERTS``.

    Its skill is an option, since demonstrators differ in it, and RL starts from what they show. ``speed``: its largest
    action, above 0 and at most 1. ``grasp_error`` [x, y, z], m in the world: how far beside an object it grasps, as
    with a camera that was calibrated badly.
    """

    def __init__(
        self,
        num_slots: int = 1,
        task: str = "PickCube-v1",
        speed: float = SPEED,
        grasp_error: Sequence[float] = NO_ERROR,
        **options: Any,
    ) -> None:
        if not 0 < speed <= 1:
            raise ValueError(f"env.speed is {speed}, the expert's largest action: expected above 0 and at most 1")
        check_grasp_error(grasp_error)
        if task == "PushCube-v1" and any(grasp_error):
            raise ValueError(f"env.grasp_error is {grasp_error}, and the expert of PushCube-v1 grasps nothing")
        if task not in EXPERTS:
            raise ValueError(f"env.task is {task!r}: there are scripted experts for {sorted(EXPERTS)}")
        super().__init__(num_slots=num_slots, task=task, **options)
        self._skill = speed, grasp_error
        self._experts: dict[int, Any] = {}
        self._seeds: dict[int, int] = {}
        self._noise: dict[int, ActionNoise] = {}

    def reset(self, slot: int, episode: Episode) -> Observation:
        observation = super().reset(slot, episode)
        sim, row = self._scene(slot)
        self._experts[slot] = EXPERTS[self._task](sim, Hand(sim, row, *self._skill))
        self._seeds[slot] = episode.seed
        self._noise.pop(slot, None)
        return observation

    def expert_chunk(self, slots: list[int], length: int, noise: float = 0.0) -> list[ExpertChunk]:
        wanted = {slot: np.zeros((length, self.spec.action_dim), np.float32) for slot in slots}
        counts = dict.fromkeys(slots, 0)

        def act(slot: int) -> np.ndarray:
            action = self._experts[slot].action()
            wanted[slot][counts[slot]] = action
            counts[slot] += 1
            if not noise:
                return action
            if slot not in self._noise:
                self._noise[slot] = ActionNoise(self.spec, self._seeds[slot], noise)
            return self._noise[slot](action)

        results = self._execute(slots, length, act, record=False)
        return [ExpertChunk(wanted[slot], results[i]) for i, slot in enumerate(slots)]

    def _scene(self, slot: int) -> tuple[Any, int]:
        sim, row = self._sim_of(slot)
        return sim.env, row
